"""Layers for multi-token prediction: logits as the families' own code has them, files, exact texts, and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from slipstream import LLM, SamplingParams
from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.mtp import MtpDrafter
from slipstream.draft.registry import create_drafter
from slipstream.errors import ConfigError, ModelError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model
from slipstream.models.batch import ForwardBatch
from slipstream.models.outline import outline_model
from slipstream.testing.stub_drafters import draft_context
from tests.kit.gguf_files import in_two_parts, write_model
from tests.kit.mtp_drafts import (
    CLOSE,
    TEXT,
    changed,
    drafted,
    fill,
    flags,
    make,
    states_of,
    texts,
    texts_without,
)
from tests.kit.mtp_targets import FAMILIES, HIDDEN, VOCAB, MtpTarget, mtp_target


@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_the_familys_own_layer(family: str) -> None:
    """A text in two passes, as prompts in chunks are, against one pass of Transformers' layer."""
    made, drafter = mtp_target(family), make(family)
    states = states_of(family, TEXT)
    expected = made.logits(made.step(TEXT[1:], states[:-1], **flags(made)))
    rows = len(TEXT) - 1
    pool = KVPool(drafter.head.shapes, rows, torch.float32, torch.device("cpu"))
    found = []
    for begin, end in ((0, 8), (8, rows)):
        part = ForwardBatch([RowGroup(pool.slots, begin, TEXT[begin + 1 : end + 1], range(end - begin))])
        found.append(drafter.executor.forward(part, pool, states[begin:end], level=0)[1])
    assert float((torch.cat(found) - expected).abs().max()) < CLOSE
    assert float(expected.std()) > 0.3, "logits of nothing would be close to anything"


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_its_logits_are_those_of_transformers_own_prediction_model(family: str) -> None:
    """That one does not mask the embedding at position 0."""
    made, drafter = mtp_target(family), make(family)
    main = AutoModelForCausalLM.from_pretrained(made.folder, attn_implementation="eager", dtype=torch.float32)
    theirs: Any = MtpModel(main, 1).eval()
    layer = theirs.layers[0]
    for name in ("embedding_norm", "hidden_norm", "projection", "final_norm"):
        its = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj"}.get(
            name, "post_norm"
        )
        getattr(layer, its).load_state_dict(getattr(made.parts[0], name).state_dict())
    layer.mtp_block.load_state_dict(made.whole.model.layers[2].state_dict())
    states, rows = states_of(family, TEXT)[:-1], len(TEXT) - 1
    positions, token_ids = torch.arange(1, rows + 1)[None], torch.tensor([TEXT[1:]])
    with torch.no_grad():
        output = theirs.forward_layer(
            0, states[None], positions, MtpCache(config=theirs.config), input_ids=token_ids
        )
        expected = main.lm_head(output)[0]
    drafter.head.form = dataclasses.replace(drafter.head.form, masks_first=False)
    pool = KVPool(drafter.head.shapes, rows, torch.float32, torch.device("cpu"))
    whole = ForwardBatch([RowGroup(pool.slots, 0, TEXT[1:], range(rows))])
    found = drafter.executor.forward(whole, pool, states, level=0)[1]
    assert float((found - expected).abs().max()) < CLOSE


def reference_chain(
    family: str, text: list[int], depth: int, *, recycles_normed: bool, **fed: bool
) -> list[int]:
    """The same by whole passes: a step's row reads the output of the step before in the target's state's place."""
    made = mtp_target(family)
    states, chain = states_of(family, text)[:-1], []
    for _ in range(depth):
        output = made.step([*text[1:], *chain], states, **fed)
        chain.append(int(made.logits(output[-1:])[0].argmax()))
        last = made.parts[0].final_norm(output[-1:]) if recycles_normed else output[-1:]
        states = torch.cat([states, last])
    return chain


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_feeds_each_step_with_the_one_before(family: str) -> None:
    drafter = make(family, num_speculative_tokens=4)
    expected = reference_chain(
        family, TEXT, 4, recycles_normed="glm" not in family, **flags(mtp_target(family))
    )
    assert drafted(drafter, TEXT, 4) == expected


def test_the_options_say_how_the_layer_is_fed() -> None:
    form = make("llama", hidden="pre", recycled="y", order="he").head.form
    assert (form.hidden_is_normed, form.recycles_normed, form.hidden_first) == (False, False, True)
    chain = reference_chain("llama", TEXT, 4, recycles_normed=False, hidden_first=True, masks_first=True)
    assert drafted(make("llama", recycled="y", order="he", num_speculative_tokens=4), TEXT, 4) == chain
    assert drafted(make("llama", num_speculative_tokens=4), TEXT, 4) != chain
    with pytest.raises(ConfigError, match="unknown mtp order 'ee'"):
        make("llama", order="ee")


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_the_state_before_the_targets_final_norm(family: str) -> None:
    """It is had from the one behind it, up to a scale that the layer's own norm takes out."""
    made, drafter = mtp_target(family), make(family, hidden="pre")
    whole = made.whole
    with torch.no_grad():
        inner = torch.tensor([TEXT])
        hidden = whole.model(inner, output_hidden_states=True).hidden_states[-2][
            0
        ]  # its last layer is the head's
        states = whole.model.norm(hidden)
    encoded = drafter.head.encode(states)
    found, expected = drafter.head.layer(0).hidden_norm(encoded), made.parts[0].hidden_norm(hidden)
    assert float((found - expected).abs().max()) < 1e-3
    assert float((drafter.head.layer(0).hidden_norm(states) - expected).abs().max()) > 0.05


TREE = {"tree_top_k": 2, "num_draft_nodes": 5}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", TREE),
        ("deepseek", TREE),
        ("deepseek*2", {}),
        ("llama*2", {**TREE, "num_speculative_tokens": 4}),
        ("mimo-v2*3", {"num_speculative_tokens": 5}),
    ],
)
def test_texts_are_those_without_it(family: str, options: dict[str, Any]) -> None:
    """In a batch, in chunks, and with prefixes of earlier requests."""
    spec = {"method": "mtp", **options}
    llm = LLM(mtp_target(family).folder, speculative_config=spec, max_num_batched_tokens=9)
    num_drafted: list[int] = []
    llm.engine.on_observe = lambda seen: num_drafted.extend(len(one.proposal) for one in seen)
    for _ in range(2):
        assert texts(llm) == texts_without(family)
    assert llm.engine.stats().num_draft_failures == 0
    assert sum(num_drafted) > 100


@pytest.mark.parametrize(
    ("family", "outer", "joined"),
    [
        ("qwen3.5", "qwen3_5", False),
        ("qwen3.5-moe", "qwen3_5_moe", False),
        ("qwen3.5-moe", "qwen3_5_moe", True),
    ],
)
def test_a_checkpoint_that_reads_images_brings_them_too(
    family: str, outer: str, joined: bool, tmp_path: Path
) -> None:
    """As Qwen's are: `mtp.*` beside a language model inside. Its experts may be stacked."""

    def inside(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config |= {"model_type": outer, "text_config": text, "tie_word_embeddings": False}
        if joined:
            join_experts(tensors)
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    folder = changed(tmp_path, inside, family)
    context = dataclasses.replace(draft_context(VOCAB, 256), target=load_model(folder))
    drafter = create_drafter(SpeculativeConfig("mtp", options={"num_speculative_tokens": 4}), context)
    assert isinstance(drafter, MtpDrafter)
    assert drafted(drafter, TEXT, 4) == drafted(make(family, num_speculative_tokens=4), TEXT, 4)
    llm = LLM(folder, speculative_config={"method": "mtp"})
    num_drafted: list[int] = []
    llm.engine.on_observe = lambda seen: num_drafted.extend(len(one.proposal) for one in seen)
    assert texts(llm) == texts_without(family)
    assert sum(num_drafted) > 50


def join_experts(tensors: dict[str, Tensor]) -> None:
    """Make one tensor of all experts' of a layer: of what gates and of what is gated, and of what leads back."""
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        own = sorted(name for name in tensors if name.startswith(f"{layer}.experts."))
        found = {name.removeprefix(f"{layer}.experts."): tensors.pop(name) for name in own}
        if "gate_up_proj" in found:
            tensors |= {f"{layer}.experts.{name}": tensor for name, tensor in found.items()}
            continue
        stacks = {
            part: torch.stack([found[f"{number}.{part}.weight"] for number in range(len(found) // 3)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = torch.cat([stacks["gate_proj"], stacks["up_proj"]], dim=1)
        tensors |= {
            f"{layer}.experts.gate_up_proj": gate_up,
            f"{layer}.experts.down_proj": stacks["down_proj"],
        }


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_greedy_texts_with_the_other_verifiers(verifier: str) -> None:
    spec = {"method": "mtp", "verifier": verifier}
    assert texts(LLM(mtp_target("llama").folder, speculative_config=spec))[:2] == texts_without("llama")[:2]


@pytest.mark.parametrize("family", ["llama", "llama*2", "mimo-v2*3"])
def test_true_states_replace_its_own(family: str) -> None:
    """After any verdict a proposal is the one of a drafter that meets the text for the first time."""
    spec = {"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
    llm = LLM(mtp_target(family).folder, speculative_config=spec, enable_prefix_caching=False)
    engine, checked = llm.engine, 0
    drafter = engine.drafter
    assert isinstance(drafter, MtpDrafter)
    engine.add_request("a", TEXT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        for sequence in engine.scheduler.running:
            first = drafter.propose([sequence], [3])[0]
            if sequence.id in drafter.cache.accounting:
                drafter.cache.accounting.close(sequence.id, retain=False)
            assert drafter.propose([sequence], [3])[0].token_ids == first.token_ids
            checked += len(first) > 0
    assert checked > 8


@pytest.mark.parametrize("family", [*FAMILIES, "llama*2", "mimo-v2*3"])
def test_a_plan_knows_what_it_holds(family: str) -> None:
    drafter = make(family)
    outlined = dataclasses.replace(
        drafter.context, target=None, target_outline=outline_model(mtp_target(family).folder)
    )
    planned = MtpDrafter.footprint(drafter.options, outlined)
    assert planned.traits == drafter.traits
    drafter.allocate(64)
    assert planned.traits.kv_bytes_per_token * 64 == drafter.cache.memory_bytes()
    number = sum(weight.numel() for weight in dict(drafter.head.named_parameters()).values())
    assert (
        number * 4 < planned.head_bytes < drafter.executor.footprint()
    )  # whose panels are as wide as 64 outputs


def drop_all(tensors: dict[str, Tensor], config: Any) -> None:
    for name in [name for name in tensors if ".layers.2." in name]:
        del tensors[name]


PLACE = "model.layers.2."


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            drop_all,
            r"has no layer for multi-token prediction: no model\.layers\.2\.eh_proj\.weight, mtp\.fc\.weight",
        ),
        (
            lambda t, c: t.pop(f"{PLACE}eh_proj.weight"),
            r"no model\.layers\.2\.eh_proj\.weight, .* among the 14 tensors that the target does not read",
        ),
        (lambda t, c: t.pop(f"{PLACE}hnorm.weight"), r"lacks the tensor model\.layers\.2\.hnorm\.weight"),
        (
            lambda t, c: t.pop(f"{PLACE}mlp.up_proj.weight"),
            r"lacks the tensor model\.layers\.2\.mlp\.up_proj\.weight",
        ),
        (
            lambda t, c: t.pop(f"{PLACE}shared_head.norm.weight"),
            r"lacks the tensor model\.layers\.2\.shared_head\.norm\.weight",
        ),
        (
            lambda t, c: t.update({f"{PLACE}odd.weight": torch.ones(2)}),
            r"has an unknown tensor model\.layers\.2\.odd\.weight",
        ),
        (
            lambda t, c: t.update({f"{PLACE}eh_proj.weight": torch.ones(32, 32)}),
            r"has model\.layers\.2\.eh_proj\.weight of shape \[32, 32\], not \[32, 64\]",
        ),
        (
            lambda t, c: t.update({f"{PLACE}mlp.up_proj.weight": torch.ones(9, 32)}),
            r"has model\.layers\.2\.mlp\.up_proj\.weight of shape \[9, 32\], not \[48, 32\]",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_told_by_name(tmp_path: Path, change: Any, told: str) -> None:
    lm = load_model(changed(tmp_path, change))
    with pytest.raises((ConfigError, ModelError), match=told) as refused:
        create_drafter(SpeculativeConfig("mtp"), dataclasses.replace(draft_context(VOCAB, 256), target=lm))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", ["qwen3", "qwen3*2"])
def test_layers_in_the_layout_of_speculators(family: str) -> None:
    """The same layers in a folder of the target's own checkpoint, and drafts with the first one."""
    made = mtp_target(family, "speculators")
    lm = load_model(made.folder)
    context = dataclasses.replace(draft_context(VOCAB, 256), target=lm)
    drafter = create_drafter(SpeculativeConfig("mtp", options={"num_speculative_tokens": 1}), context)
    assert isinstance(drafter, MtpDrafter)
    states, rows = states_of(family, TEXT)[:-1], len(TEXT) - 1
    pool = KVPool(drafter.head.shapes, rows, torch.float32, torch.device("cpu"))
    whole = ForwardBatch([RowGroup(pool.slots, 0, TEXT[1:], range(rows))])
    found = drafter.executor.forward(whole, pool, states, level=0)[1]
    expected = made.logits(made.step(TEXT[1:], states, hidden_first=False, masks_first=False))
    assert float((found - expected).abs().max()) < CLOSE


_QWEN35 = {
    **{"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 2},
    **{"full_attention_interval": 2, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.state_size": 6},
    **{"ssm.inner_size": 40, "ssm.conv_kernel": 4, "rope.freq_base": 1e4},
}
"""Keys of a hybrid's file, by which every second layer attends; not so the prediction layer, which always does."""


def with_prediction(file: Path, family: str, arch: str) -> MtpTarget:
    """A family's target in a GGUF file, with its prediction layers behind its own and one quantised matrix."""
    made = mtp_target.__wrapped__(family)
    number = len(made.parts)
    names = {"eh_proj": "projection", "enorm": "embedding_norm", "hnorm": "hidden_norm"}
    names |= {"shared_head_norm": "final_norm"}
    nextn = {
        f"blk.{2 + k}.nextn.{theirs}.weight": getattr(made.parts[k], ours).weight
        + int(arch == "qwen35" and theirs != "eh_proj")
        for theirs, ours in names.items()
        for k in range(number)
    }
    nextn["blk.2.nextn.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    keys = {"nextn_predict_layers": number, **(_QWEN35 if arch == "qwen35" else {})}
    kinds = {"blk.2.attn_q.weight": "Q8_0"}
    write_model(file, arch, made.whole, keys, kinds, {name: each.numpy() for name, each in nextn.items()})
    return made


IN_GGUF = [("llama", "llama"), ("mimo", "qwen2"), ("llama*2", "llama"), ("qwen3.5", "qwen35")]


@pytest.mark.parametrize(("family", "arch"), IN_GGUF)
def test_a_gguf_file_has_the_layers_behind_its_own(family: str, arch: str, tmp_path: Path) -> None:
    """Its layers have plain numbers and one quantised matrix, whose rows Llama's files permute."""
    file = tmp_path / "target.gguf"
    made = with_prediction(file, family, arch)
    number = len(made.parts)
    lm = load_model(str(file))
    assert lm.num_layers == 2
    context = dataclasses.replace(draft_context(VOCAB, 256), target=lm)
    drafter = create_drafter(SpeculativeConfig("mtp"), context)
    assert isinstance(drafter, MtpDrafter)
    states, rows = torch.randn(13, HIDDEN, generator=torch.Generator().manual_seed(3)), 13
    pool = fill(rows + 1, drafter)
    whole = ForwardBatch([RowGroup(pool.slots, 0, TEXT[1:], range(rows))])
    given, found = drafter.executor.forward(whole, pool, states, level=0)
    fed = {"hidden_first": False, "masks_first": arch != "qwen35"}
    output = made.step(TEXT[1:], states, **fed)
    assert float((found - made.logits(output)).abs().max()) < CLOSE
    if number > 1:
        one = ForwardBatch([RowGroup(pool.slots, rows, [7], [0])])
        found = drafter.executor.forward(one, pool, given[-1:], level=1)[1]
        output = made.step([*TEXT[2:], 7], made.parts[0].final_norm(output), number=1, **fed)
        assert float((found - made.logits(output[-1:], 1)).abs().max()) < CLOSE
    in_two_parts(file, tmp_path / "folder")
    for path in (file, tmp_path / "folder"):
        planned = dataclasses.replace(context, target=None, target_outline=outline_model(str(path)))
        assert MtpDrafter.footprint(drafter.options, planned).traits == drafter.traits


def test_texts_of_a_hybrids_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "target.gguf"
    made = with_prediction(file, "qwen3.5", "qwen35")
    expected = texts(LLM(str(file), tokenizer=made.folder))
    spec = {"method": "mtp"}
    llm = LLM(str(file), tokenizer=made.folder, speculative_config=spec, max_num_batched_tokens=9)
    num_drafted: list[int] = []
    llm.engine.on_observe = lambda seen: num_drafted.extend(len(one.proposal) for one in seen)
    for _ in range(2):
        assert texts(llm) == expected
    assert sum(num_drafted) > 100


@pytest.mark.parametrize("count", [3, 2**31])
def test_a_gguf_file_of_prediction_layers_alone_is_refused(count: int, tmp_path: Path) -> None:
    file = tmp_path / "target.gguf"
    write_model(file, "llama", mtp_target("llama").whole, {"nextn_predict_layers": count})
    with pytest.raises(ModelError, match=f"says that {count} of its 3 layers are for multi-token prediction"):
        load_model(str(file))


def test_a_quantised_layer_is_widened() -> None:
    """FP8, a scale a matrix, in the layer as in its target, as DeepSeek's checkpoints are."""
    made = mtp_target.__wrapped__("llama")
    folder = Path(made.folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name.removesuffix('weight')}weight_scale_inv"] = scale.reshape(1)
        numbers = tensors[name].float() * scale
        if name.endswith("eh_proj.weight"):
            made.parts[0].projection.weight.data.copy_(numbers)
        elif name in made.whole.state_dict():
            made.whole.state_dict()[name].copy_(numbers)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "fp8"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    lm = load_model(made.folder, dtype="float32")
    drafter = create_drafter(
        SpeculativeConfig("mtp"), dataclasses.replace(draft_context(VOCAB, 256), target=lm)
    )
    assert isinstance(drafter, MtpDrafter)
    states, rows = (
        torch.randn(len(TEXT) - 1, HIDDEN, generator=torch.Generator().manual_seed(3)),
        len(TEXT) - 1,
    )
    pool = KVPool(drafter.head.shapes, rows, torch.float32, torch.device("cpu"))
    whole = ForwardBatch([RowGroup(pool.slots, 0, TEXT[1:], range(rows))])
    found = drafter.executor.forward(whole, pool, states, level=0)[1]
    expected = made.logits(made.step(TEXT[1:], states, hidden_first=False, masks_first=True))
    assert float((found - expected).abs().max()) < CLOSE


def test_texts_after_preemption() -> None:
    """The cache has no room for four requests at their ends."""
    folder, spec = mtp_target("llama").folder, {"method": "mtp"}
    usual = LLM(folder, speculative_config=spec)
    room = 120 * usual.engine.memory_plan.kv_bytes_per_token
    tight = LLM(folder, speculative_config=spec, kv_cache_bytes=room, max_model_len=40)
    assert texts(tight) == texts_without("llama")
    assert tight.engine.stats().num_preemptions > 0
