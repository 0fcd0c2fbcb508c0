"""Several processes, one a GPU: `torchrun --nproc-per-node 8 at2po.py …`. Without torchrun there is one, and
every function here hands back what it was given.

    rollouts, evaluations  rank r of N plays the agents r, r + N, …; all get all results (rollout.run_agents)
    updates                each learns from its part of every mini-batch (training.collate_parts)
    weights                with gradients and moments cut over the ranks by FSDP2, whole a layer at a time
    files, terminal        rank 0's

So every rank has all of a step's trajectories, and computes rewards, advantages, denominators, metrics and
decisions for itself, which come out alike. What is added up are gradients, and the sums of an update.
"""

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist

from common.files import console

PATIENCE = timedelta(hours=4)  # with the slowest rank; torchrun ends the others at once where one dies
alone = False                  # whether the others are waiting for this one


# ---------------------------------------------------------------- processes

def start():
    """Joins the processes that torchrun started with this one."""
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(dist.get_node_local_rank())
        # objects travel by gloo, tensors of a GPU by NCCL
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                                timeout=PATIENCE)
    console.quiet = rank() > 0


def rank():
    return dist.get_rank() if world() > 1 else 0


def world():
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() and not alone else 1


def share(items):
    """This rank's part of a list that all have."""
    return list(items)[rank()::world()]


def gather(own):
    """The list of which every rank has its share(); of any lists, their items in turn."""
    if world() == 1:
        return list(own)
    parts = [None] * world()
    dist.all_gather_object(parts, list(own))
    nothing = object()
    in_turn = itertools.zip_longest(*parts, fillvalue=nothing)
    return [item for items in in_turn for item in items if item is not nothing]


def once(function, *args, **named):
    """Rank 0 calls it when all are here, and all go on when it is done: for what is written."""
    gather([])
    if rank() == 0:
        _as_one(function, *args, **named)
    gather([])


def first(function, *args):
    """What it returns on each rank; rank 0 is done before the others begin, who find on disk what it made."""
    if rank() > 0:
        gather([])
    value = _as_one(function, *args)
    if rank() == 0:
        gather([])
    return value


def _as_one(function, *args, **named):
    """Calls it as if this process were the only one."""
    global alone
    outer = alone
    alone = True
    try:
        return function(*args, **named)
    finally:
        alone = outer


# ---------------------------------------------------------------- weights

def shard(model):
    """Cuts the weights of a causal LM over the ranks. Each layer is whole while it computes, embedding and
    last norm while the decoder does; the head's weight is read apart from its module, through whole()."""
    if world() == 1:
        return model
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    for unit in (*decoder.layers, decoder):
        cut(unit)
    if tied:
        head.weight = embedding.weight
    else:
        cut(head)
    return model


def cut(module):
    """Cuts a module's weights over the ranks; they are whole while it computes."""
    if world() > 1:
        from torch.distributed.fsdp import fully_shard
        # the outermost, too, is cut again after each pass: old log-probs have no backward
        fully_shard(module, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # losses are parts of one sum, not means
        module.set_force_sum_reduction_for_comms(True)


def whole(tensor):
    """A tensor that may be cut over the ranks, in one piece; its gradient is the sum of theirs."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Partial
    return tensor.full_tensor(grad_placements=[Partial()])


def collect(tensors, by_all=False):
    """{name: whole tensor} on the CPU of rank 0, {} on the others; by_all: of each rank, a part of them.
    Names of one tensor keep one."""
    if world() == 1:
        return tensors
    made = {}
    with torch.no_grad():
        for tensor in tensors.values():
            if id(tensor) not in made:
                piece = whole(tensor)   # all ranks take part
                keeper = len(made) % world() if by_all else 0
                made[id(tensor)] = piece.cpu() if rank() == keeper else None
    kept = {name: made[id(tensor)] for name, tensor in tensors.items()}
    return {name: piece for name, piece in kept.items() if piece is not None}


def cut_like(tensor, other):
    """This rank's part of a tensor that all have, cut as `other` is."""
    if not hasattr(other, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
