"""What a model is when it has been loaded: without dropout, with its own numbers, or refused; adapters as
they are handed to vLLM; rows of the head that are no tokens; ends of a turn."""

import asyncio
import copy
import functools
import json
import subprocess
import sys
from unittest import mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

import at2po
from common import chat, data, model, rollout, run, training, tree_blocks
from common.checkpoint import ModelError
from common.engine import Generation, TransformersEngine
from common.gpu.vllm_engine import own_parameters, policy_weights
from common.rollout import Trajectory, Turn
from common.world.tiny import tiny_tokenizer
from tests.conftest import ROOT

SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def tokenizer():
    return tiny_tokenizer([f"w{i}" for i in range(40)], ["<a>", "</a>"])


def saved(folder, kind, tokens=None, change=lambda made: None, **settings):
    """A folder with random weights of an architecture, larger than a fresh model's: differences then show."""
    tokens = tokens or tokenizer()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **{"vocab_size": len(tokens), **SMALL, **settings}, eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id)
    made = transformers.AutoModelForCausalLM.from_config(config)
    for p in made.parameters():
        if p.dim() > 1:
            p.data.mul_(3)
    change(made)
    made.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return str(folder)


def policy_of(folder, trains=False, **how):
    """As the scripts load it: the engine is compared, too."""
    cfg = at2po.Config(engine="transformers", cache_gb=.1, **how)
    return run.Run(cfg).policy(folder, trains=trains)


@pytest.mark.parametrize("more", range(4))
def test_loaded_weights_lie_where_pytorch_puts_its_own(more, tmp_path):
    folder = saved(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    # the file's header of another length, and with it all places
    save_file(load_file(file), file, metadata={"format": "pt", "more": "x" * 8 * more})
    loaded = model.load_model(folder, device="cpu", precision="fp32")
    assert {p.data_ptr() % 64 for p in loaded.parameters()} == {0}


# ---- a folder's weights are all there, and the model's

def renamed(old, new):
    return lambda weights: {key.replace(old, new, 1): w for key, w in weights.items()}


def without(part):
    return lambda weights: {key: w for key, w in weights.items() if part not in key}


@pytest.mark.parametrize("change, config, words", [
    (lambda w: {f"_orig_mod.{k}": v for k, v in w.items()}, {}, "lacks .*embed_tokens.weight.* of a wrapper"),
    (renamed("model.", "language_model.model."), {}, "lacks .*embed_tokens"),
    (without("layers.1."), {}, r"lacks model.layers.1.* in all"),
    (without("model.norm"), {}, r"lacks model.norm.weight \(1 in all\)"),
    (without("lm_head"), {}, r"lacks lm_head.weight \(1 in all\)"),
    (dict, {"num_hidden_layers": 1}, "has weights that its model does not: model.layers.1"),
    (dict, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "are quantised"),
    (without("lm_head"), {"tie_word_embeddings": True}, ""),  # a tied head is nowhere
])
def test_a_folder_that_lacks_weights_or_has_others_is_refused(change, config, words, tmp_path):
    folder = saved(tmp_path, "qwen3", tie_word_embeddings=False)
    file, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    given = json.loads(settings.read_text()) | config
    if "num_hidden_layers" in config:
        given["layer_types"] = given["layer_types"][:1]
    settings.write_text(json.dumps(given))
    if not words:
        model.load_model(folder)
        return
    for load in (model.load_model, lambda name: model.load_reference(mock.Mock(in_bf16=False), name, 0)):
        with pytest.raises(ModelError, match=words.replace("of a wrapper", "through a wrapper")):
            load(folder)


@pytest.mark.parametrize("old, new", [("base_model.model.", ""), ("model.layers.1", "model.layers.7")])
def test_adapters_that_do_not_fit_their_base_are_refused(old, new, tmp_path):
    base = saved(tmp_path / "base", "qwen3")
    model.load_model(base, lora=2).save_pretrained(tmp_path / "adapters")
    tokenizer().save_pretrained(tmp_path / "adapters")
    model.load_policy(tmp_path / "adapters")
    file = tmp_path / "adapters/adapter_model.safetensors"
    save_file({key.replace(old, new): w for key, w in load_file(file).items()}, file)
    for load in (model.load_policy, lambda name: model.folded(name, tmp_path / "folded")):
        with pytest.raises(ModelError, match="adapters lacks base_model.model"):
            load(str(tmp_path / "adapters"))
    weights = load_file(tmp_path / "base/model.safetensors")
    save_file(without("model.norm")(weights), tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="base lacks model.norm.weight"):  # the base's own
        model.load_policy(tmp_path / "adapters")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    folder = saved(tmp_path, "qwen3")
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="a model without a tokenizer"):
        model.load_policy(folder)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])  # turned, and learned, positions
def test_a_sequence_ends_at_the_model_s_last_position(kind, tmp_path):
    sizes = dict(num_key_value_heads=4) if kind == "gpt2" else {}
    policy = policy_of(saved(tmp_path, kind, max_position_embeddings=40, **sizes))
    engine, most = policy.engine, model.positions(policy.model.config)
    engine.sync(policy.model)

    async def sample(prompt_ids):
        return await engine.generate(prompt_ids, max_tokens=100, temperature=1.0, seed=0)

    engine.eos = set()
    ids = model.probe_ids(policy.tokenizer, 10, 0)
    found, = rollout.run_agents([sample(ids)], engine, rollout.BatchedSearch(None), rollout.no_progress)
    assert (len(ids) + len(found.token_ids), found.stop_reason) == (most, "length")
    with pytest.raises(ModelError, match=f"a prompt of {most} tokens; the model's positions end at {most}"):
        asyncio.run(sample(ids * (most // 10)))
    split = data.Split("test", [], None)
    with pytest.raises(ModelError, match=f"8,192 tokens; the model's positions end at {most}"):
        at2po.AGENT.within_limit(policy, [split], at2po.Config())


# ---- one check in place of a list of architectures

@pytest.mark.parametrize("kind, settings", [
    ("qwen3", {}),
    ("qwen3_moe", EXPERTS),
    ("phi3", dict(sliding_window=512)),          # a window that never cuts
    ("granite", dict(logits_scaling=1.0)),       # a scale of 1 scales nothing
])
def test_models_whose_numbers_are_their_own_load(kind, settings, tmp_path):
    assert policy_of(saved(tmp_path, kind, **settings)).engine.cache is None


@pytest.mark.parametrize("kind, settings, why", [
    ("granite", dict(logits_scaling=2.0), "training gives its tokens other log-probs"),
    ("cohere", dict(logit_scale=.5), "training gives its tokens other log-probs"),
    ("mistral", dict(sliding_window=8), "--engine transformers does not know: use --engine vllm"),
    ("llama", dict(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), "dynamic"),
    ("qwen3_next", EXPERTS, "without full attention.* use --engine vllm")])
def test_other_models_are_refused_in_one_line_and_told_what_differs(kind, settings, why, tmp_path):
    with pytest.raises(ModelError, match=why) as refused:
        policy_of(saved(tmp_path, kind, **settings))
    assert "\n" not in str(refused.value)


def test_a_head_with_a_bias_is_refused(tmp_path):
    folder = saved(tmp_path, "phi", change=lambda made: torch.nn.init.normal_(made.lm_head.bias))
    with pytest.raises(ModelError, match="training gives its tokens other log-probs"):
        policy_of(folder)


def test_a_sampler_with_other_numbers_is_refused(tmp_path, monkeypatch):
    folder = saved(tmp_path, "qwen3")
    logits = TransformersEngine._logits
    monkeypatch.setattr(TransformersEngine, "_logits", lambda self, hidden: 1.02 * logits(self, hidden))
    with pytest.raises(ModelError, match="sampling gives its tokens other log-probs .* by 0.0"):
        policy_of(folder)


# ---- what bf16 moves, and what is wrong

HOW = [dict(precision="fp32"), dict(precision="bf16"), dict(precision="bf16", lora=4)]


def with_large_key_biases(made):
    """As Qwen2.5's: bf16 then moves log-probs of random ids as much as many a fault would."""
    for name, p in made.named_parameters():
        if p.dim() > 1:
            p.data.mul_(40 if "q_proj" in name or "k_proj" in name else 10 / 3)
        elif "k_proj" in name:
            p.data = 17 * torch.randn_like(p).sign() + 8 * torch.randn_like(p)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_model_that_bf16_moves_far_has_no_unknown_parts(how, tmp_path):
    folder = saved(tmp_path, "qwen2", change=with_large_key_biases, num_hidden_layers=4)
    policy = policy_of(folder, trains=True, **how)
    assert policy.model.in_bf16 == (how["precision"] == "bf16")
    held = {p.dtype for p in policy.model.parameters()}
    assert held == ({torch.float32, torch.bfloat16} if "lora" in how else {torch.float32})
    ids = model.probe_ids(policy.tokenizer, 60, 0)
    row = Trajectory("", [5, 6], [Turn(ids, [0.0] * 60, "", "")])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.plain_logprobs(policy.model, row)
    policy.model.in_bf16 = True
    with model.in_fp32(policy.model):
        exact = model.plain_logprobs(policy.model, row)
    assert (rounded - exact).abs().mean() > .1
    assert held == {p.dtype for p in policy.model.parameters()} and policy.model.in_bf16


def other_scale(attend):
    return lambda *args, scaling=None, **kwargs: attend(*args, scaling=1.1 * scaling, **kwargs)


def no_branches(attend):
    def blind(module, query, key, value, end, **kwargs):
        return attend(module, query, key, value, torch.full_like(end, end.shape[-1]), **kwargs)
    return blind


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("wrong", [other_scale, no_branches])
def test_a_pass_that_attends_otherwise_is_refused_in_any_precision(wrong, how, tmp_path, monkeypatch):
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(attention, "blocks", wrong(tree_blocks.block_attention))
    with pytest.raises(ModelError, match="training gives its tokens other log-probs"):
        policy_of(saved(tmp_path, "qwen2"), trains=True, **how)


def test_what_a_gpu_loads_first_is_compared_too(tmp_path):
    """A device of another name takes a GPU's branch, in a process that has attached nothing yet."""
    folder = saved(tmp_path, "qwen2", head_dim=16)
    code = ("import torch; from common import model; "
            f"found, _ = model.load_policy({folder!r}, device=torch.device('cpu'), precision='fp32'); "
            "print(found.config._attn_implementation)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "tree\n", done.stderr[-500:]


# ---- layers without full attention

class Recomputing:
    """An engine that reads all anew for every token: nothing is reused."""
    busy = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def sync(self, policy):
        self.model = policy.eval()

    def sleep(self):
        pass

    async def generate(self, prompt_ids, stop, max_tokens, temperature, seed):
        random = torch.Generator().manual_seed(seed)
        ids, logprobs = list(prompt_ids), []
        for _ in range(max_tokens):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1, :self.model.vocabulary]
            of_next = (logits / temperature).log_softmax(-1)
            ids.append(int(torch.multinomial(of_next.exp(), 1, generator=random)))
            logprobs.append(float(of_next[ids[-1]]))
        return Generation(ids[len(prompt_ids):], logprobs, "length")


LINEAR = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)


@pytest.mark.parametrize("kind, settings", [
    ("qwen3_5_text", LINEAR | dict(head_dim=8)),
    ("qwen3_next", EXPERTS | LINEAR | dict(head_dim=8, shared_expert_intermediate_size=24)),
    ("gemma3_text", dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"], head_dim=8)),
    ("mistral", dict(sliding_window=8))])
def test_what_cannot_share_prefixes_trains_unshared_and_says_so_once(
        kind, settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "make_engine", lambda cfg, model, tokenizer, trains: Recomputing(tokenizer))
    policy = policy_of(saved(tmp_path, kind, **settings), trains=True)
    assert capsys.readouterr().out.count("cannot share prefixes") == 1
    prompt, first = [5, 6, 7] * 4, Turn([8, 9, 10] * 4, [0.0] * 12, "", "")
    rows = [Trajectory("", prompt, [first, Turn(list(range(9, 9 + n)), [0.0] * n, "", "")]) for n in (20, 7)]
    batch, = training.collate_parts(policy.model, rows, 10**6)
    assert not batch.is_tree and batch.lengths.sum() == sum(t.length for t in rows)
    hidden = model.hidden_states(policy.model, batch)
    padded = model.token_logprobs(policy.model, batch, hidden=hidden)[batch.response_mask]
    alone = torch.cat([model.plain_token_logprobs(policy.model, [t])[0, len(prompt):] for t in rows])
    assert torch.allclose(padded, alone, atol=1e-4)
    ours, own = (gradient(policy.model, logprobs.square().sum()) for logprobs in (padded, alone))
    assert (ours - own).norm() < 1e-3 * own.norm()


def gradient(policy, loss):
    trained = [p for p in policy.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


# ---- dropout

@pytest.mark.parametrize("kind, settings", [
    ("llama", dict(attention_dropout=.3)),
    ("starcoder2", dict(residual_dropout=.3, embedding_dropout=.3, sliding_window=None)),
    ("gpt2", dict(resid_pdrop=.3, embd_pdrop=.3, attn_pdrop=.3, n_embd=32, n_head=4, n_layer=2)),
    ("opt", dict(dropout=.3, ffn_dim=48, word_embed_proj_dim=32))])
def test_dropout_of_any_name_is_off(kind, settings, tmp_path):
    policy, _ = model.load_policy(saved(tmp_path, kind, **settings))
    assert draws_alike(policy)


def test_dropout_of_an_adapter_folder_is_off(tmp_path):
    _, folder = adapter_folder(tmp_path, "llama", {"lora_dropout": .5, "target_modules": "all-linear"})
    policy, _ = model.load_policy(str(folder))
    assert draws_alike(policy) and policy.peft_config["default"].lora_dropout == 0


def draws_alike(policy):
    batch = rollout.collate([Trajectory("", [5, 6, 7], [Turn([8, 9, 10], [0.0] * 3, "", "")])])
    return torch.equal(model.token_logprobs(policy, batch), model.token_logprobs(policy, batch))


# ---- adapters, as they are handed to vLLM

def adapted_from(base, **settings):
    """A model with adapters that change what it says."""
    config = LoraConfig(**{"r": 4} | settings)
    adapted = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(1)
    for p in adapted.parameters():
        if p.requires_grad:
            p.data += .2 * torch.randn_like(p)
    return adapted


def adapter_folder(tmp_path, kind, settings, **base):
    adapted = adapted_from(saved(tmp_path / "base", kind, **base), **settings)
    adapted.save_pretrained(tmp_path / "adapters")
    tokenizer().save_pretrained(tmp_path / "adapters")
    return adapted, tmp_path / "adapters"


@pytest.mark.parametrize("kind, how", [
    ("llama", {}),
    ("llama", dict(use_rslora=True)),
    ("llama", dict(rank_pattern={"q_proj": 8}, alpha_pattern={"v_proj": 3})),
    ("llama", dict(bias="all")),
    ("llama", dict(target_modules=["q_proj", "embed_tokens"])),
    ("qwen3_moe", {}),
    ("mixtral", dict(use_rslora=True)),
], ids=str)
def test_what_vllm_is_handed_is_peft_s_own_merge(kind, how, tmp_path):
    folder = saved(tmp_path, kind, **(EXPERTS if kind != "llama" else {}), tie_word_embeddings=False)
    adapted = adapted_from(folder, **{"lora_alpha": 8, "target_modules": "all-linear"} | how)
    handed_over = {name: weight.clone() for name, weight in policy_weights(adapted)}
    assert list(handed_over) == list(own_parameters(adapted))
    merged = dict(copy.deepcopy(adapted).merge_and_unload().named_parameters())
    assert handed_over.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(handed_over[name], weight, rtol=1e-5, atol=1e-6)


# ---- the tokenizer's ids, and no others

def test_rows_of_the_head_that_are_no_tokens_are_neither_sampled_nor_counted(tmp_path):
    tokens = tokenizer()
    folder = saved(tmp_path, "qwen3", vocab_size=4 * len(tokens), tie_word_embeddings=True)
    policy = policy_of(folder)
    policy.engine.sync(policy.model)
    asked = [policy.engine.generate([5, 6], max_tokens=40, seed=seed) for seed in range(20)]
    said = rollout.run_agents(asked, policy.engine, rollout.BatchedSearch(None))
    assert max(i for g in said for i in g.token_ids) < len(tokens)
    made = [Trajectory("", [5, 6], [Turn(g.token_ids, g.logprobs, "", "")]) for g in said]
    batch = rollout.collate(made)
    found = model.token_logprobs(policy.model, batch)
    assert (found - batch.rollout_logprobs).abs().max() < 1e-4  # the trainer leaves them out, too
    weights = dict(policy_weights(policy.model))
    assert len(weights["model.embed_tokens.weight"]) == len(tokens)  # nor does vLLM see them


def test_a_base_model_stops_where_its_template_closes_a_turn(tmp_path):
    """Its own end is another token: conversations would go on behind the turn."""
    tokens = tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokens.chat_template = (
        "{% for m in messages %}{{ '[USER] ' + m['content'] + '<|im_end|>' }}{% endfor %}")
    policy, loaded = model.load_policy(saved(tmp_path, "llama", tokens))
    ends = model.end_of_sequence(policy, loaded)
    assert ends == {loaded.eos_token_id, loaded.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("special", [False, True])
def test_tags_that_are_special_tokens_are_read_like_others(special):
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    tokens = tiny_tokenizer("Ada Holt".split(), [*tags, "\\boxed{", "}"])
    if special:
        tokens.add_special_tokens({"additional_special_tokens": tags})
    text = "<think> Ada </think> <answer> \\boxed{ Ada Holt } </answer>"
    ids = chat.encode(tokens, text)[1] + [tokens.eos_token_id]
    said = rollout.sampled_text(tokens, ids, "eos")
    turn = Turn(ids, [0.0] * len(ids), "eos", said)
    assert at2po.parse_response([turn]) == ("Ada Holt", "")
    assert rollout.sampled_text(tokens, ids[:-1], "</answer>") == said


def test_probes_are_text(qwen):
    tokens = model.load_tokenizer(str(qwen))
    drawn = model.probe_ids(tokens, 500, 0)
    assert not set(drawn) & chat.added_tokens(tokens)[0] and len(set(drawn)) > 400
    assert drawn == model.probe_ids(tokens, 500, 0) != model.probe_ids(tokens, 500, 1)


def test_a_run_folder_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model.find_model(str(tmp_path)) == str(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/trainer.json").write_text("{}")
    with pytest.raises(ModelError, match="a run folder; the weights are in .*/checkpoint$"):
        model.find_model(str(tmp_path))


def test_layers_that_are_computed_again_give_the_same_gradient(qwen):
    """As on a GPU, where activations are not kept."""
    found = []
    for again in (False, True):
        policy = model.load_model(str(qwen), recomputes=again).train()
        ids = torch.arange(20)[None]
        policy(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert found[0].abs().max() > 0 and torch.allclose(found[0], found[1], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, dict(recomputes=True, lora=4)])
def test_compiled_layers_give_the_same_log_probs_and_gradients(how, tmp_path, monkeypatch):
    """The graphs of a GPU, by PyTorch's own operations; few serve all layers and lengths. (Here a layer has
    two, before and behind attention by blocks, which is not compiled.)"""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    folder = saved(tmp_path, "qwen3", num_hidden_layers=3)
    plain, _ = model.load_policy(folder, **how)
    compiled, _ = model.load_policy(folder, **how)
    compiled.load_state_dict(plain.state_dict())
    for layer in compiled.get_decoder().layers:
        layer.compile(dynamic=True)
    torch._dynamo.reset()  # what the test before has compiled
    counters.clear()
    for n in (5, 40):
        first = Turn([7] * n, [0.0] * n, "", "")
        rows = [Trajectory("", [5, 6], [first, Turn([8] * k, [0.0] * k, "", "")]) for k in (4, 9)]
        batch = rollout.collate(rows)
        with torch.no_grad():
            model.token_logprobs(compiled, batch)
        found = [model.token_logprobs(policy, batch) for policy in (plain, compiled)]
        assert torch.allclose(*found, atol=1e-5)
        own, its = (gradient(p, lp.square().sum()) for p, lp in zip((plain, compiled), found, strict=True))
        assert own.norm() > 0 and (own - its).norm() < 1e-4 * own.norm()
    assert 0 < counters["stats"]["unique_graphs"] <= 10 and not counters["recompile_limit"]
    assert copy.deepcopy(compiled).get_decoder().layers[0]._compiled_call_impl is None  # nor is the engine's


@pytest.mark.parametrize("target, tied, refused", [
    ("embed_tokens", True, True), ("embed_tokens", False, False), ("q_proj", True, False)])
def test_adapters_are_folded_where_that_changes_nothing(target, tied, refused, tmp_path):
    lora = {"target_modules": [target]}
    adapted, folder = adapter_folder(tmp_path, "qwen3", lora, tie_word_embeddings=tied)
    if refused:
        with pytest.raises(ModelError, match="folding of adapters gives its tokens other log-probs"):
            model.folded(folder, tmp_path / "merged")
        assert not list(tmp_path.glob("merged*/config.json"))
        return
    merged, _ = model.load_policy(str(model.folded(folder, tmp_path / "merged")))
    row = Trajectory("", [5, 6], [Turn([7, 8, 9] * 5, [0.0] * 15, "", "")])
    adapted.vocabulary = merged.vocabulary
    assert torch.allclose(*(model.plain_logprobs(m, row) for m in (adapted, merged)), atol=1e-4)


def test_what_is_not_trained_is_told_without_its_optimizer(tmp_path, capsys):
    policy_of(saved(tmp_path, "qwen3"))
    said = capsys.readouterr().out
    assert "M weights on cpu" in said and "optimizer" not in said and "to train" not in said


@pytest.mark.parametrize("how, road", [
    (dict(precision="fp32"), "SubBackward0"), (dict(precision="bf16"), "_LinearLogprobBackward"),
    (dict(precision="fp32", lora=4), "_FrozenHeadBackward"),
    (dict(precision="bf16", lora=4), "_FrozenHeadBackward")], ids=str)
def test_a_head_takes_the_fastest_road_on_a_cpu_with_the_same_numbers(how, road, tmp_path, monkeypatch):
    policy, _ = model.load_policy(saved(tmp_path, "qwen3"), **how)
    batch = rollout.collate([Trajectory("", [5, 6], [Turn([7, 8, 9] * 5, [0.0] * 15, "", "")])])
    head, roads, found = model.turn_logprob, [], []

    def on(backend, *args, **named):
        out = head(*args, **named, backend=backend)
        roads.append(type(out.logprobs.grad_fn).__name__)
        return out

    for backend in ("auto", "reference"):
        monkeypatch.setattr(model, "turn_logprob", functools.partial(on, backend))
        hidden = model.hidden_states(policy, batch)
        logprobs = model.token_logprobs(policy, batch, hidden=hidden)
        found.append((logprobs.detach(), gradient(policy, logprobs.sum())))
    (ours, our_gradient), (plain, its_gradient) = found
    assert roads == [road, "SubBackward0"] and torch.allclose(ours, plain, atol=.02)
    assert (our_gradient - its_gradient).norm() < .02 * its_gradient.norm()
