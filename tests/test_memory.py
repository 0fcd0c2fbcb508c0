"""What a training holds, what is refused, and the recipes, which must fit what they name."""

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
    """Qwen3's configurations: 28 layers of width 1,024, 36 of 2,560; 8 heads of 128 for keys and values."""
    small, large = skeletons["Qwen/Qwen3-0.6B"], skeletons["Qwen/Qwen3-4B"]
    cfg = at2po.Config()
    n = weights(small)
    assert memory.count(small, cfg, "cpu") == (12 * n, 4 * n)
    assert memory.count(small, cfg, "cpu", ranks=8, num_frozen=1) == (16 * n / 8, 4 * n / 8)
    n = weights(large)
    eight_bit = replace(cfg, optimizer="adamw8bit")
    assert memory.count(large, eight_bit, "cuda") == pytest.approx((6.03 * n, 4 * n))
    # Mujica's reference, whole beside adapters: 64 numbers for each row and column of a layer's 7 matrices
    r = 64 * 36 * (7 * 2560 + 2 * 4096 + 2 * 1024 + 3 * 9728)
    assert memory.count(large, replace(cfg, lora=64), "cuda", num_frozen=1) == (12 * r + 4 * n, 4 * r)


def test_activations_are_kept_where_they_fit(tmp_path, monkeypatch):
    """29.6 GB were held on an H100 in such an update (results/notes/gpu.md)."""
    MODELS["Qwen/Qwen3-0.6B"].save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "default_device", lambda: "cuda")
    cfg = replace(at2po.Config(), micro_tokens=8192)
    for gigabytes, again in ((28, True), (38, False)):
        monkeypatch.setattr(memory, "device_bytes", lambda gigabytes=gigabytes: gigabytes * 1e9)
        assert memory.check(cfg, str(tmp_path)) == again


# ---------------------------------------------------------------- what is refused

def test_a_run_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    MODELS["Qwen/Qwen3-4B"].save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "device_bytes", lambda: 24e9)
    for device, remedy in (("cpu", "--precision bf16 --lora 16"), ("cuda", "--lora 64")):
        monkeypatch.setattr(memory, "default_device", lambda device=device: device)
        with pytest.raises(SystemExit, match=f"wants 64.4 GB .*24.0 GB are free here. Try {remedy}"):
            memory.check(at2po.Config(), str(tmp_path))
    monkeypatch.setattr(memory, "default_device", lambda: "cpu")
    monkeypatch.setattr(memory, "device_bytes", lambda: 66e9)
    memory.check(at2po.Config(), str(tmp_path))


RECIPES = sorted((ROOT / "recipes").glob("*x*.args"))  # small-*.args name no model


def fits(model, cfg, room, device="cuda", **how):
    """In an update that computes activations again, roughly, and in a rollout with a sampler's weights."""
    held, gradients = memory.count(model, cfg, device, **how)
    config = model.config
    update = gradients + 6 * cfg.micro_tokens * config.num_hidden_layers * config.hidden_size
    rollout = 2 * weights(model) + 2 * cfg.cache_gb * 2**30
    return held + max(update, rollout) < room


def test_every_recipe_parses_and_fits_its_machine(skeletons, monkeypatch):
    monkeypatch.setattr(memory.torch.cuda, "is_available", lambda: True)
    for file in RECIPES:
        name, *_, machine = file.stem.split("-")
        cfg = importlib.import_module(name).parse_args([f"@{file}"])
        assert file.read_text().startswith("# ") and f"{name}.py @recipes/{file.name}" in file.read_text()
        if name == "askit":
            continue
        model = skeletons[cfg.model]
        ranks = int(machine.split("x")[0])
        num_frozen = int(cfg.kl_coef > 0 and not cfg.lora or name == "mygo_mujica")  # (grpo)
        room = .9 * GB[machine]  # a tenth for what PyTorch rounds up
        assert fits(model, cfg, room, ranks=ranks, num_frozen=num_frozen), file.name
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
        assert fits(model, cfg, room * 2**30, "cuda" if machine == "gpu" else "cpu")


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
