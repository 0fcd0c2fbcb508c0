"""The engine of common/engine.py on vLLM, in this process: the same methods, weights of its own.

    engine = VllmEngine(model, tokenizer)    # starts vLLM and hands it the weights, in memory
    engine.sync(model)                       # hands over new ones, wakes it, and forgets keys and values
    engine.sleep()                           # on a GPU: gives its memory to the trainer until the next sync

One step() is one step of vLLM's scheduler, so rollout.run_agents drives it as it drives ours. A sample
depends on (prompt, seed) alone, up to rounding, but its random stream is not that of TransformersEngine.

There is one vLLM a process. It takes half a minute to start and reserves its memory at once, so engines of
one architecture (the stages of a run, a frozen sampler beside the policy) take turns in it: whoever synced
last may sample. vLLM is imported when the first engine is made, and nowhere else.
"""

import asyncio
import atexit
import copy
import gc
import itertools
import os
import random
import re
import sys
import tempfile
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from common import distributed
from common.checkpoint import ModelError
from common.engine import MAX_BATCH, Generation
from common.files import one_line, say
from common.model import computes_in_bf16, end_of_sequence, head_dim, head_rows, key_heads
from common.rollout import PLACE

ENVIRONMENT = {  # where the user says nothing
    "VLLM_NO_USAGE_STATS": "1",              # it would report home
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",   # threads are the program's (common/process.py)
}
running = None    # the process's _Running


# ---------------------------------------------------------------- weights

def own_parameters(model):
    """{name in a checkpoint: parameter} of the language model, without what adapters add or put around it."""
    around = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
    named = model.named_parameters()
    return {around.sub("", name): parameter for name, parameter in named if ".lora_" not in name}


def policy_weights(model):
    """Yields (checkpoint name, tensor) of every weight, one at a time: shards gathered, adapters added to
    their base as peft's own merge does, the head's padding left out."""
    adapted = {}
    for module in model.modules():
        if hasattr(module, "get_delta_weight"):
            field = getattr(module, "parameter_name", "weight")  # of experts it is another
            adapted[id(getattr(module.get_base_layer(), field))] = module
    embeddings = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    for name, parameter in own_parameters(model).items():
        weight = distributed.whole(parameter).detach()
        if id(parameter) in adapted:
            delta = distributed.whole(adapted[id(parameter)].get_delta_weight("default"))
            weight = weight + delta.detach().to(weight.dtype)
        yield name, head_rows(model, weight) if id(parameter) in embeddings else weight


def _pack_head_again(vllm_model):
    """vLLM's CPU build multiplies with a packed copy of the head; reload_weights makes it anew where the head
    has weights of its own, and leaves the old one where it is tied to the embedding."""
    head = vllm_model.lm_head
    head.quant_method.process_weights_after_loading(head)


# ---------------------------------------------------------------- the process's vLLM

@dataclass(eq=False)
class _Running:
    """The process's vLLM."""
    kind: tuple          # architecture, vocabulary and options that it was started for
    llm: object
    holder: object = None    # the engine whose weights it has
    asleep: bool = False
    numbers: object = field(default_factory=itertools.count)    # names of its requests


def _start(model, tokenizer, options):
    """The _Running for this architecture, vocabulary and options: the one that runs, or a new one in its
    place."""
    global running
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # below its adapters
    config = copy.deepcopy(model.config)
    config.architectures = [type(base).__name__]
    config.dtype = None  # options say in what it computes; a policy and its frozen sampler differ here
    config.vocab_size = head_rows(model, model.get_output_embeddings().weight).shape[0]
    kind = config.to_json_string(), len(tokenizer), options
    if running and running.kind == kind:
        return running
    if running and distributed.world() > 1:
        raise ModelError("--engine vllm: a model of another architecture, vocabulary or cache than before, "
                         "and vLLM cannot be started twice under torchrun: run this stage on its own")
    _stop()
    atexit.register(_stop)  # registered once more, it finds nothing to stop
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights need no transport
    with tempfile.TemporaryDirectory() as folder, _process_undisturbed():
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        running = _Running(kind, _load_vllm(folder, options))
    return running


def _stop():
    """Ends the process's vLLM and frees its memory. What sleeps is woken first: its memory is gone already,
    and to give it back again ends in a segmentation fault."""
    global running
    if running is None:
        return
    ended, running = running, None
    ended.holder = None
    if ended.asleep and torch.cuda.is_available():
        ended.llm.wake_up()
    ended.llm.engine_core.shutdown()
    del ended
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _load_vllm(folder, options):
    import vllm
    gigabytes = options["kv_cache_memory_bytes"] / 2**30
    say(f"starting vLLM {vllm.__version__}: {options['dtype']}, sequences of at most "
        f"{options['max_model_len']} tokens, {gigabytes:.2f} GB for keys and values")
    try:
        return vllm.LLM(folder, **options).llm_engine
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"--engine vllm: vLLM does not start with this model ({one_line(error)[:300]}); "
                         "use --engine transformers") from error


@contextmanager
def _process_undisturbed():
    """vLLM seeds every generator of the process, and its CPU build makes torch.set_num_threads a no-op. It
    also looks into every loaded module, and stumbles over llvmlite's (bm25s brings it, through numba)."""
    states = random.getstate(), np.random.get_state()
    set_num_threads = torch.set_num_threads
    hidden = {name: sys.modules.pop(name) for name in ("llvmlite.binding.ffi",) if name in sys.modules}
    try:
        with torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        sys.modules.update(hidden)
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])


# ---------------------------------------------------------------- the engine

class VllmEngine:
    """max_batch: sequences decoded together, at most. cache_gb: as in TransformersEngine, keys and values of
    running sequences, and as much again for those that are done; less where max_batch of the longest
    sequences need less.

    bf16 on a GPU, whatever --precision says (its attention kernels know no fp32); on a CPU as training's
    forward pass. What vLLM leaves out of a model without a word is found when Run.policy compares numbers."""

    def __init__(self, model, tokenizer, max_batch=MAX_BATCH, cache_gb=4.0):
        self.tokenizer = tokenizer
        self.gpu = model.device.type == "cuda"
        self.in_bf16 = self.gpu or computes_in_bf16(model)
        self.eos = end_of_sequence(model, tokenizer)
        if model.config.model_type == "qwen3" and model.config.attention_bias:
            raise ModelError("--engine vllm: vLLM's Qwen3 has no bias behind attention, which the embedded "
                             "world's tiny policy has: use --engine transformers")
        options = self._options(model.config.get_text_config(), max_batch, cache_gb)
        self.max_length = options["max_model_len"]
        self.cache_bytes = options["kv_cache_memory_bytes"]
        self.vllm = _start(model, tokenizer, options)
        self.llm = self.vllm.llm
        self.futures = {}                    # name of a request -> who waits for it
        self.reused_tokens = 0
        self.sync(model)

    def _options(self, config, max_batch, cache_gb):
        """What vLLM is started with."""
        width = 2 if self.in_bf16 else 4
        bytes_per_token = config.num_hidden_layers * 2 * key_heads(config) * head_dim(config) * width
        longest = config.max_position_embeddings
        wanted = max_batch * longest * bytes_per_token
        cache_bytes = int(2 * min(cache_gb * 2**30, wanted))
        length = min(longest, cache_bytes // bytes_per_token - 64)
        # a prompt that is read in pieces rewinds its random numbers, which a CPU's generator cannot do
        whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(length, max_batch)}
        return ({} if self.gpu else whole) | {
            "load_format": "dummy",                    # the first sync brings the weights
            "dtype": "bfloat16" if self.in_bf16 else "float32",
            "max_model_len": length,
            "max_num_seqs": max_batch,
            "scheduling_policy": "priority",           # agents that were begun before others
            "kv_cache_memory_bytes": cache_bytes,
            "gpu_memory_utilization": .01,             # not read beside kv_cache_memory_bytes, but checked
            "block_size": 16 if self.gpu else 32,      # the least there is: prefixes are found at multiples
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",     # at the sampling temperature
            "generation_config": "vllm",               # nothing of the model's own sampling settings
            "enable_sleep_mode": self.gpu,
            "enforce_eager": not self.gpu,
            # under torchrun it is one of several processes, each with an engine of its own
            "distributed_executor_backend": "external_launcher" if distributed.world() > 1 else None,
            "seed": 0,
            "disable_log_stats": True,
        }

    @property
    def busy(self):
        return bool(self.futures)

    async def generate(self, prompt_ids, stop=(), max_tokens=512, temperature=1.0, seed=0):
        """As TransformersEngine.generate."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        if len(prompt_ids) >= self.max_length:
            raise ModelError(
                f"--engine vllm: a prompt of {len(prompt_ids)} tokens; the model's positions, or what "
                f"--cache-gb has room for, end at {self.max_length}. Shorten prompts or observations, raise "
                "--cache-gb, or use --engine transformers")
        if self.vllm.holder is not self or self.vllm.asleep:
            raise RuntimeError("sync before sampling: vLLM sleeps, or has the weights of another policy")
        self.asked = self.asked or (list(prompt_ids), tuple(stop))
        params = SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            stop=list(stop),
            include_stop_str_in_output=True,
            stop_token_ids=sorted(self.eos),
            ignore_eos=True,                           # those above are all there are
            skip_special_tokens=False,                 # stop strings may be special tokens
            logprobs=0,                                # of the sampled token
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = str(next(self.vllm.numbers))
        self.llm.add_request(name, tokens_input(list(prompt_ids)), params, priority=PLACE.get())
        future = asyncio.get_running_loop().create_future()
        self.futures[name] = future
        return await future

    def step(self):
        """One step of vLLM's scheduler: a token for every running request, prefill of those that are
        admitted."""
        self._drop_cancelled()
        eager = nullcontext()
        if not self.gpu:  # compiling a sum for each new batch size takes longer than all the sums
            eager = torch.compiler.set_stance("force_eager")
        with eager:
            results = self.llm.step()
        for result in results:
            future = self.futures.pop(result.request_id, None)
            if future is None or future.done():
                continue
            future.set_result(self._generation(result.outputs[0]))
            self.reused_tokens += result.num_cached_tokens or 0

    @staticmethod
    def _generation(output):
        ids = list(output.token_ids)
        logprobs = [at[token].logprob for token, at in zip(ids, output.logprobs, strict=True)]
        if output.finish_reason == "length":
            return Generation(ids, logprobs, "length")
        stopped_by = output.stop_reason     # the stop string, or the id that ends the sequence
        return Generation(ids, logprobs, stopped_by if isinstance(stopped_by, str) else "eos")

    def _drop_cancelled(self):
        """A cancelled rollout leaves nothing behind."""
        cancelled = [name for name, future in self.futures.items() if future.done()]
        if cancelled:
            self.llm.abort_request(cancelled)
        for name in cancelled:
            del self.futures[name]

    @torch.no_grad()
    def sync(self, model):
        """The engine goes on with the weights of `model`, which are copied, and forgets all keys and values;
        wakes it."""
        for engine in (self.vllm.holder, self):
            if engine is not None:
                engine._drop_cancelled()
        if self.llm.has_unfinished_requests():
            raise RuntimeError("sync while generations are running")
        self.asked = None
        wakes = self.vllm.asleep and self.gpu
        if wakes:
            self.llm.wake_up(["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": policy_weights(model)})
        if not self.gpu:
            self.llm.apply_model(_pack_head_again)
        if wakes:
            self.llm.wake_up(["kv_cache"])
        self.vllm.asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget the keys and values of the old weights")
        self.vllm.holder = self

    def sleep(self):
        """Gives the memory of weights, keys and values to the trainer until the next sync, before which
        nothing can be sampled; on a CPU there is nothing to give."""
        self._drop_cancelled()
        if self.gpu and not self.vllm.asleep:
            self.llm.sleep(level=2)
        self.vllm.asleep = True
