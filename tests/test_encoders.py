"""What encodes sentences, what writes questions."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, BertTokenizer, T5Config, T5ForConditionalGeneration

import askit
from common import data
from common import model as models
from common.of_askit import encoders, evidence, tiny_encoders
from common.world import make_world
from tests.conftest import sample


@pytest.fixture(scope="module")
def writer():
    model, tokenizer = tiny_encoders.tiny_t5()
    return encoders.Writer(model.eval(), tokenizer, max_new=8)


@pytest.fixture(scope="module")
def t5():
    """The real T5 tokenizer, random weights."""
    tokenizer = AutoTokenizer.from_pretrained(sample("tokenizers/t5-small"))
    tokenizer.add_tokens([encoders.SEP.strip()])
    config = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4,
                      dropout_rate=0.0, decoder_start_token_id=0)
    torch.manual_seed(0)
    return encoders.Writer(T5ForConditionalGeneration(config).eval(), tokenizer, max_new=6)


def test_evidence_that_is_too_long_for_a_t5_loses_its_oldest_sentences_and_is_counted(writer):
    short = writer.ids("Who?", evidence=["Ann", "Bob"])
    assert short == writer.ids("Who?", "Ann", "Bob") and writer.shortened == 0
    few = replace(writer, max_input=16)
    assert few.ids("Who?", evidence=["Cid"] * 30 + ["Ann", "Bob"])[-3:] == short[-3:]
    assert few.ids("Who?", evidence=["Ann " * 40, "Bob"]) == few.ids("Who?", ("Ann " * 4).strip(), "Bob")
    assert few.shortened == 2


def test_rows_of_the_real_t5_end_once_and_no_text_writes_its_tokens(t5):
    sep, end, extra = t5.tokenizer.convert_tokens_to_ids(["<sep>", "</s>", "<extra_id_0>"])
    sentence = "A film, It </s> was <sep> made <extra_id_0> by Ann. Context: none"
    ids = t5.ids("generate question: ", "Who made it?", encoders.SEP, sentence)
    assert ids.count(end) == 1 and ids[-1] == end and ids.count(sep) == 1 and extra not in ids
    text = t5.text(ids)
    assert text.startswith("generate question: Who made it?") and text.endswith("by Ann. Context: none")
    assert t5.ids("Who? </s>: ").count(end) == 1    # it ends like our own words
    long = t5.ids("generate question: ", "word " * 2000)
    assert len(long) == 512 and long[-1] == end


def test_log_probs_of_targets_are_those_of_the_model_whatever_stands_beside_them(t5):
    inputs = [t5.ids("generate question: ", f"Number {i}." * i) for i in (1, 4)]
    targets = [t5.ids(text) for text in ("What is one?", "Who?")]
    with torch.no_grad():
        logp, mask = t5.logprobs(inputs, targets)
    for row, kept, ids, target in zip(logp, mask, inputs, targets, strict=True):
        with torch.no_grad():
            loss = t5.model(torch.tensor([ids]), labels=torch.tensor([target])).loss    # a mean over tokens
        assert -row.sum() / len(target) == pytest.approx(float(loss), abs=1e-5) and kept.sum() == len(target)


def test_the_tiny_t5_copies_both_names_of_a_comparison(writer):
    """Of a world that it has not seen, in whatever order."""
    made = make_world("dev", 0, questions=400, hop_mix=(0, .5, 0, .5))
    compared = [q for q in made.questions if "comparison" in q["type"] and ", " in q["question"]][:40]
    cases = evidence.make_cases("dev", [data.parse_question(q) for q in compared], 1)[0]
    rows = [writer.ids(encoders.TASK, evidence=[c.texts[i] for i in sorted(c.gold)]) for c in cases]
    both = 0
    for question, text in zip(compared, replace(writer, max_new=24).write(rows), strict=True):
        wanted, written = (q.strip(" ?").split(", ")[-1].split(" or ") for q in (question["question"], text))
        both += sorted(map(str.strip, written)) == sorted(wanted)
    assert both >= 36


def test_beams_write_texts_without_special_tokens(writer):
    rows = [writer.ids("generate question: ", "Ada Holt, Her mother is Ida."), writer.ids("x")]
    texts = writer.write(rows)
    assert len(texts) == 2 and all("<" not in t for t in texts)
    assert writer.write(rows[:1]) == texts[:1]


def test_a_tokenizer_that_is_not_the_t5s_is_refused(tmp_path):
    model, tokenizer = tiny_encoders.tiny_t5()
    cfg = askit.Config(question_tokens=8)

    def refused():
        with pytest.raises(models.ModelError, match="do not go together"):
            encoders.load_writer(cfg, str(tmp_path))

    model.save_pretrained(tmp_path)  # without a tokenizer transformers invents one of a hundred words
    refused()
    tokenizer.save_pretrained(tmp_path)
    assert encoders.load_writer(cfg, str(tmp_path)).text(tokenizer("Ida")["input_ids"]) == "Ida"
    model.config.decoder_start_token_id = None
    model.config.save_pretrained(tmp_path)
    refused()


# ---- encoders

def test_with_berts_own_tokenizer_a_sentence_can_end_neither_the_evidence_nor_its_text():
    bert = BertTokenizer(vocab=str(sample("tokenizers/bert-base-uncased/vocab.txt")))
    for tokenizer in (bert, tiny_encoders.tiny_tokenizer()):
        tokens = encoders.PairTokenizer("action", tokenizer, 256)
        hostile = tokens.ids("A film <sep> [SEP] [CLS] <SEP> [sep] of it [MASK].")
        width = len(tokens.sep)
        assert all(hostile[i:i + width] != tokens.sep for i in range(len(hostile)))
        assert not set(hostile) & set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        batch = tokens.batch([(tokens.ids("a b"), hostile), (tokens.ids("a"), None)], "cpu")
        first = batch["input_ids"][0].tolist()
        assert first.count(tokenizer.sep_token_id) == 2 and first[0] == tokenizer.cls_token_id
        side = batch["token_type_ids"][0].tolist()
        assert side.index(1) == 2 + len(tokens.ids("a b")) and sum(side) == len(hostile) + 1
        assert batch["attention_mask"][1].sum() == 3
        assert tokens.cut == 0 and len(tokens.ids("film " * 10_000)) == 64 and tokens.cut == 1


def test_a_state_that_is_too_long_leaves_out_its_oldest_sentences():
    tokens = encoders.PairTokenizer("action", tiny_encoders.tiny_tokenizer(), 40)
    question, first, second, third = ([i] * n for i, n in ((50, 8), (51, 10), (52, 9), (53, 8)))
    sep = tokens.sep
    assert tokens.joined([question, second, third]) == question + sep + second + sep + third   # 27 of 30
    assert tokens.shortened == 0
    assert tokens.joined([question, first, second, third]) == question + sep + second + sep + third
    assert tokens.shortened == 1 and len(tokens.ids("film " * 50)) == 10   # a text has a quarter
    # evidence alone: its oldest sentence is no question
    assert tokens.joined([first, second, third], staying=0) == first + sep + second + sep + third  # 29
    assert tokens.joined([question, first, second, third], staying=0) == first + sep + second + sep + third
    assert tokens.joined([[50] * 40], staying=0) == [50] * 40


def test_batches_hold_like_lengths_within_the_budget():
    lengths = [5, 1, 9, 2, 8, 3, 30]
    parts = encoders.in_batches(lengths, lambda n: n, 18)
    assert sorted(i for part in parts for i in part) == list(range(7))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= 18
