"""The estimate against what was measured, what it refuses, and the recipes, which must fit what they name."""

import importlib
from dataclasses import replace

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

import at2po
from common import flags
from common.gpu import memory
from tests.conftest import ROOT

GB = {"1x24": 24 * 2**30, "1x80": 79.2 * 2**30, "8x80": 79.2 * 2**30}  # an H100 says 79.18 GiB


def qwen3(hidden, layers, inner, heads=32, tied=True):
    return Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=tied)


def qwen25(hidden, layers, inner, heads, keys, vocabulary=151936, tied=True):
    return Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=keys, vocab_size=vocabulary, tie_word_embeddings=tied)


MODELS = {
    "Qwen/Qwen3-0.6B": qwen3(1024, 28, 3072, heads=16),
    "Qwen/Qwen3-1.7B": qwen3(2048, 28, 6144, heads=16),
    "Qwen/Qwen3-4B": qwen3(2560, 36, 9728),
    "Qwen/Qwen3-14B": qwen3(5120, 40, 17408, heads=40, tied=False),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen25(1536, 28, 8960, 12, 2),
    "Qwen/Qwen2.5-3B-Instruct": qwen25(2048, 36, 11008, 16, 2),
    "Qwen/Qwen2.5-7B-Instruct": qwen25(3584, 28, 18944, 28, 4, vocabulary=152064, tied=False)}


@pytest.fixture(scope="module")
def skeletons():
    return {name: memory.skeleton(config) for name, config in MODELS.items()}


def weights(model):
    return sum(p.numel() for p in model.parameters())


def test_weights_are_counted_as_their_makers_count_them(skeletons):
    billions = [round(weights(model) / 1e9, 2) for model in skeletons.values()]
    assert billions == [.60, 1.72, 4.02, 14.77, 1.54, 3.09, 7.62]


def test_a_small_and_a_large_policy_by_hand(skeletons):
    """Qwen3's configurations: .6 B and 4.02 B weights; 28 layers of width 1,024, 36 of 2,560; 8 heads of 128
    for keys, as many for values."""
    small, large = skeletons["Qwen/Qwen3-0.6B"], skeletons["Qwen/Qwen3-4B"]
    cfg = at2po.Config(engine="transformers", micro_tokens=1000, cache_gb=1.0)
    held, update, rollout = memory.estimate(small, cfg, "cpu")
    n = weights(small)
    assert list(held.values()) == [4 * n, 0, 8 * n, 0]
    assert list(update.values()) == [4 * n, 120 * 1000 * 28 * 1024, 14 * 1000 * 151936]
    assert rollout == {"keys and values": 2 * 2**30}
    most = memory.estimate(small, replace(cfg, cache_gb=1e9), "cpu")[2]
    assert most == {"keys and values": 2 * 384 * 32768 * 2 * 28 * 8 * 128 * 4}
    cfg = at2po.Config(engine="vllm", micro_tokens=1000, optimizer="adamw8bit", cache_gb=8.0)
    n = weights(large)
    held, update, rollout = memory.estimate(large, cfg, "cuda")
    assert list(held.values()) == [4 * n, 0, 2.03 * n, 0]
    assert list(update.values()) == [4 * n, 6 * 1000 * 36 * 2560, 2 * n]
    assert sum(rollout.values()) == 2 * n + 16 * 2**30
    peak = memory.peak(held, update, rollout)
    assert peak == pytest.approx(6.03 * n + max(6 * n + 6e3 * 36 * 2560, 2 * n + 2**34))
    # Mujica's reference, whole beside adapters: 64 numbers for each row and column of a layer's 7 matrices
    r = 64 * 36 * (7 * 2560 + 2 * 4096 + 2 * 1024 + 3 * 9728)
    adapters = replace(cfg, optimizer="adamw", lora=64)
    held = memory.estimate(large, adapters, "cuda", frozen=1)[0]
    assert list(held.values()) == [4 * r, 2 * n, 8 * r, 2 * n]


def in_update(*estimated):
    held, update, _ = estimated
    return (sum(held.values()) + sum(update.values())) / 1e9


def test_what_a_gpu_held_in_an_update(skeletons):
    """Peak of allocated memory on an H100, PyTorch 2.11, random trees (results/notes/gpu.md)."""
    for model, settings, measured in (
        ("0.6B", {}, 11.99),
        ("0.6B", {"optimizer": "adamw8bit"}, 8.32),
        ("0.6B", {"micro_tokens": 22530}, 13.05),
        ("4B", {"optimizer": "adamw8bit"}, 51.2),
        ("4B", {}, 80.9),
    ):
        cfg = replace(at2po.Config(), **{"micro_tokens": 8192} | settings)
        found = in_update(*memory.estimate(skeletons["Qwen/Qwen3-" + model], cfg, "cuda"))
        assert found == pytest.approx(measured, rel=.15), settings


def test_a_cpu_s_logits_are_counted():
    """11.0 GB were taken by an update of Qwen2.5-Coder-0.5B with adapters, and 6.6 were said."""
    model = memory.skeleton(qwen25(896, 24, 4864, 14, 2))
    cfg = at2po.Config(engine="transformers", micro_tokens=2048, cache_gb=1.0, lora=32, precision="bf16")
    assert memory.peak(*memory.estimate(model, cfg, "cpu")) / 1e9 == pytest.approx(11.0, rel=.1)
    longer = replace(cfg, micro_tokens=8192)
    logits = [memory.estimate(model, c, "cpu")[1]["logits, roughly"] for c in (cfg, longer)]
    assert logits[1] == 2 * logits[0]  # 4,096 rows at a time


def test_activations_are_kept_where_they_fit(tmp_path, monkeypatch):
    """An H100 had 75 bytes more for each token, layer and hidden unit (results/notes/gpu.md)."""
    MODELS["Qwen/Qwen3-0.6B"].save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "default_device", lambda: "cuda")
    cfg = replace(at2po.Config(), engine="transformers", micro_tokens=8192, cache_gb=4.0)
    for gigabytes, again in ((24, True), (80, False)):
        monkeypatch.setattr(memory, "device_bytes", lambda gigabytes=gigabytes: gigabytes * 1e9)
        assert memory.check(cfg, str(tmp_path)) == again
        assert not memory.check(cfg, str(tmp_path), trains=False)
    model = memory.skeleton(MODELS["Qwen/Qwen3-0.6B"])
    found = in_update(*memory.estimate(model, cfg, "cuda", recomputes=False))
    assert found == pytest.approx(29.6, rel=.15)


# ---------------------------------------------------------------- what is refused

def test_a_run_is_refused_before_its_weights_are_read(tmp_path, monkeypatch, capsys):
    MODELS["Qwen/Qwen3-4B"].save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "device_bytes", lambda: 24e9)
    with pytest.raises(SystemExit) as refused:
        memory.check(at2po.Config(), str(tmp_path))
    for what in ("with these flags wants about ", "here are 24.0; ", "moments 32.2", "--lora 64",
                 "--optimizer adamw8bit", "torchrun"):
        assert what in str(refused.value)
    # on a CPU the limits on tokens and caches are only warned of
    monkeypatch.setattr(memory, "device_bytes", lambda: 66e9)
    memory.check(at2po.Config(), str(tmp_path))
    assert "may want" in capsys.readouterr().out
    monkeypatch.setattr(memory, "device_bytes", lambda: 400e9)
    memory.check(at2po.Config(), str(tmp_path))
    assert not capsys.readouterr().out


def test_ranks_share_weights_and_moments_but_not_what_samples(skeletons):
    cfg = replace(at2po.Config(), engine="vllm")
    one, _, rollout = memory.estimate(skeletons["Qwen/Qwen3-4B"], cfg, "cuda")
    eight, _, as_much = memory.estimate(skeletons["Qwen/Qwen3-4B"], cfg, "cuda", ranks=8)
    for what in ("trained weights", "moments"):
        assert eight[what] == one[what] / 8
    assert as_much == rollout


RECIPES = sorted((ROOT / "recipes").glob("*x*.args"))  # small-*.args name no model


def test_every_recipe_parses_and_fits_its_machine(skeletons, monkeypatch):
    monkeypatch.setattr(memory.torch.cuda, "is_available", lambda: True)
    for file in RECIPES:
        name, *_, machine = file.stem.split("-")
        cfg = importlib.import_module(name).parse_args([f"@{file}"])
        assert file.read_text().startswith("# ") and f"{name}.py @recipes/{file.name}" in file.read_text()
        if name == "askit":
            continue
        model, cfg = skeletons[cfg.model], replace(cfg, engine="vllm")
        ranks = int(machine.split("x")[0])
        frozen = int(cfg.kl_coef > 0 and not cfg.lora or name == "mygo_mujica")  # (--stage offline, grpo)
        for trains in (True, False):  # and a stage that only evaluates
            found = memory.estimate(model, cfg, "cuda", ranks=ranks, frozen=frozen, trains=trains)
            room = .9 * GB[machine]  # a tenth for what PyTorch rounds up
            assert memory.peak(*found) < room, (file.name, found)
        assert ranks == 1 or 4 * weights(model) < GB[machine]  # every rank loads it whole
    named = {f"{s}-{machine}" for s in ("at2po", "bi_rar", "mygo_mujica", "omne_r1") for machine in GB}
    assert named <= {file.stem for file in RECIPES}


def test_recipes_evaluate_500_questions_a_set_along_the_way_and_all_by_another_command():
    for file in RECIPES:
        name = file.stem.split("-")[0]
        if name not in ("at2po", "bi_rar", "mygo_mujica"):  # (Omne-R1 takes 400 a set)
            continue
        parse_args = importlib.import_module(name).parse_args
        assert parse_args([f"@{file}"]).eval_limit == 500
        once = file.read_text().splitlines()[1].partition("once, when it is done: @")[2].split()
        assert once[0] == f"recipes/{file.name}" and once[-2:] == ["--checkpoint", "FOLDER"]
        cfg = parse_args([f"@{file}", *once[1:-1], str(file.parent)])
        assert cfg.eval_only and cfg.eval_limit == 0
        if name == "at2po":  # a policy for each kind of question, as the authors have it
            multi_hop, single_hop = at2po.AVERAGES.values()
            sets = single_hop if cfg.data == "nq" else multi_hop
            assert cfg.eval_data == ",".join(sets)


def test_the_small_recipes_fit_a_laptop_and_one_gpu(skeletons):
    smollm2 = memory.skeleton(LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True))
    assert round(weights(smollm2) / 1e6) == 135
    for machine, model, room in (("cpu", smollm2, 8), ("gpu", skeletons["Qwen/Qwen3-1.7B"], .9 * 24)):
        file = ROOT / f"recipes/small-{machine}.args"
        assert f"at2po.py @recipes/{file.name}" in file.read_text()
        cfg = at2po.parse_args([f"@{file}", "--model", "m", "--data", "my.jsonl", "--corpus", "c.jsonl"])
        assert cfg.retriever == "bm25"
        found = memory.estimate(model, cfg, "cuda" if machine == "gpu" else "cpu")
        assert memory.peak(*found) < room * 2**30, found


def test_flag_files(tmp_path, capsys):
    file = tmp_path / "a.args"
    file.write_text("# a comment\n--lr 1e-5 --name 'two words'  # and one behind\n")
    argv, given = flags.given_flags(["--seed", "3", f"@{file}", "--lora=4"])
    assert argv == ["--seed", "3", "--lr", "1e-5", "--name", "two words", "--lora=4"]
    assert given["--lr"] == "1e-5" and given["--lora"] == "4"
    with pytest.raises(SystemExit, match="error: @nowhere.args: cannot read flags from nowhere.args"):
        flags.given_flags(["@nowhere.args"])
    file.write_text("--lr 1e-5", encoding="utf-8-sig")
    assert flags.given_flags([f"@{file}"])[0] == ["--lr", "1e-5"]
    file.write_text("--name 'no end")
    with pytest.raises(SystemExit, match="No closing quotation"):
        flags.given_flags([f"@{file}"])
