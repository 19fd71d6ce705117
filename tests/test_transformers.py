"""Models that nobody here wrote: tiny ones of the `transformers` package, with random weights,
beside DDP and a plain optimizer. Nothing is downloaded."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from models import STAGES
from ranks import run_ranks

transformers_logging.set_verbosity_error()

WORDS = 37
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2():
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=12, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **TOKENS,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama():
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        use_cache=False, **TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def t5():
    config = T5Config(
        vocab_size=WORDS, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **TOKENS,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def mixtral():
    # Sizes that are multiples of 16 bytes: torch's grouped matrix product wants them.
    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=1,
        max_position_embeddings=16, output_router_logits=True, use_cache=False, **TOKENS,
    )  # fmt: skip
    return MixtralForCausalLM(config)


MODELS = [gpt2, llama, t5, mixtral]
TIED = {gpt2: ("lm_head", "transformer.wte"), t5: ("lm_head", "shared")}


def fresh(build, dtype, checkpointed, seed):
    torch.manual_seed(seed)
    model = build().to(dtype).train()
    if checkpointed:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": checkpointed == "reentrant"}
        )
    return model


def loss_of(model, rank, step, call):
    generator = torch.Generator().manual_seed(1 + rank + 10 * call + 100 * step)
    words = torch.randint(3, WORDS, (2, 7), generator=generator)
    return model(input_ids=words, labels=words).loss


def apart(one, other):
    """L2 distance of two {name: tensor}, relative to the second."""
    total = sum((one[n].double() - t.double()).square().sum().item() for n, t in other.items())
    return math.sqrt(total / sum(t.double().square().sum().item() for t in other.values()))


def ddp_gradient(model, rank, step, calls):
    """{name: the mean over ranks of the sum over calls}, as DDP and its accumulation give it."""
    model.zero_grad()
    for call in range(calls):
        if call < calls - 1:
            with model.no_sync():
                loss_of(model, rank, step, call).backward()
        else:
            loss_of(model, rank, step, call).backward()
    named = model.module.named_parameters()
    return {n: p.grad.float().clone() for n, p in named if p.grad is not None}


def given_gradient(zero, before, lr):
    """The gradient that a plain SGD step took from the masters."""
    after = zero.state_dict()["master"]
    return {n: (before[n].double() - after[n].double()) / lr for n in after}


SHAPES = [
    pytest.param(build, kind, id=f"{build.__name__}-{kind or 'plain'}")
    for build in MODELS
    for kind in (None, "not reentrant", "reentrant")
    if kind != "reentrant" or build in (gpt2, t5)
]


# The encoders' first layers get no gradient through their inputs, and torch says so.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("build", "checkpointed"), SHAPES)
def test_every_stage_trains_it_as_ddp_does(build, checkpointed):
    """FP32, clipped SGD with momentum: the weights after each of two steps of two calls."""

    def work(rank, world):
        plain = fresh(build, torch.float32, checkpointed, 0)
        ddp = DistributedDataParallel(plain, find_unused_parameters=build is mixtral)
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
        optimizer = torch.optim.SGD(plain.parameters(), **options)
        engines = []
        for make in STAGES.values():
            model = fresh(build, torch.float32, checkpointed, rank)
            zero = make(
                model,
                torch.optim.SGD,
                managed_gradient_accumulation=False,
                gradient_clipping=1.0,
                reduce_bucket_size=1000,
                **options,
            )
            engines.append((zero, model))
        for step in range(2):
            ddp_gradient(ddp, rank, step, calls=2)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
            optimizer.step()
            wanted = {n: p.detach() for n, p in plain.named_parameters()}
            for stage, (zero, model) in enumerate(engines, start=1):
                for call in range(2):
                    zero.backward(loss_of(model, rank, step, call))
                zero.step()
                assert zero.global_grad_norm == pytest.approx(norm, rel=1e-5), stage
                full = zero.model_state_dict()
                assert apart(full, wanted) < 1e-6, (stage, step)
        for _, model in engines:
            check_ties(build, model)

    run_ranks(work, 2)


def check_ties(build, model):
    if build in TIED:
        one, two = (model.get_submodule(name) for name in TIED[build])
        assert one.weight is two.weight


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpointed", [None, "not reentrant"], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("build", MODELS)
def test_in_bf16_every_stage_reduces_what_the_model_computes(build, checkpointed):
    """With bf16 reductions the bits of DDP's bf16 gradient; by default what an FP32 mean gives."""

    def work(rank, world):
        plain = fresh(build, torch.bfloat16, checkpointed, 0)
        local = copy.deepcopy(plain)
        ddp = DistributedDataParallel(plain, find_unused_parameters=build is mixtral)
        low = ddp_gradient(ddp, rank, 0, calls=1)
        loss_of(local, rank, 0, 0).backward()
        fp32 = {}
        for name, p in local.named_parameters():
            grad = torch.zeros(p.shape) if p.grad is None else p.grad.float()
            torch.distributed.all_reduce(grad)
            fp32[name] = grad / world
        for stage, make in STAGES.items():
            for dtype, wanted in ((torch.bfloat16, low), (torch.float32, fp32)):
                model = fresh(build, torch.bfloat16, checkpointed, rank)
                zero = make(
                    model,
                    torch.optim.SGD,
                    reduce_dtype=dtype,
                    grad_accum_dtype=dtype,
                    reduce_bucket_size=1000,
                    lr=2.0**10,  # else the masters' last bits would hide the gradient's
                    weight_decay=0.0,
                )
                before = zero.state_dict()["master"]
                zero.backward(loss_of(model, rank, 0, 0))
                zero.step()
                found = given_gradient(zero, before, 2.0**10)
                assert apart(found, wanted) < 1e-6, (stage, dtype)
                assert all(t.dtype == torch.bfloat16 for t in zero.model_state_dict().values())

    run_ranks(work, 2)


def test_a_model_in_eval_mode_generates_in_every_stage():
    """generate() runs many forwards, with a cache, on weights that come and go."""

    def work(rank, world):
        wanted = None
        for make in [None, *STAGES.values()]:
            model = fresh(llama, torch.float32, None, 0).eval()
            if make is not None:
                zero = make(model, torch.optim.SGD, lr=0.1, reduce_bucket_size=1000)
            words = torch.tensor([[3, 4, 5]])
            found = model.generate(words, max_new_tokens=4, do_sample=False, use_cache=True)
            wanted = found if wanted is None else wanted
            assert torch.equal(found, wanted)
        zero.close()

    run_ranks(work, 2)
