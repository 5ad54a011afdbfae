"""DFlash's head: cached context serves like the whole text, rows see what the flags say, blocks do not mix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.draft.heads.dflash_head import spread_feature_layers
from tests.kit.dflash_heads import BLOCK, HIDDEN, VOCAB, attend_over, random_head

CONTEXT = 9


def block_of(seed: int, blocks: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(blocks, BLOCK, HIDDEN, generator=generator)
    return embeds, torch.arange(CONTEXT, CONTEXT + BLOCK).expand(blocks, -1)


def features_of(seed: int = 1) -> Tensor:
    return torch.randn(CONTEXT, 32, generator=torch.Generator().manual_seed(seed))


def test_context_entries_can_be_computed_in_parts() -> None:
    head, features = random_head(), features_of()
    whole = head.context_entries(head.encode(features[None]), torch.arange(CONTEXT)[None])
    parts = [
        head.context_entries(head.encode(part[None]), positions[None])
        for part, positions in zip(features.split(4), torch.arange(CONTEXT).split(4), strict=True)
    ]
    assert [tuple(key.shape) for key, _ in whole] == [(1, 2, CONTEXT, 8)] * 2
    for layer, (key, value) in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[layer][0] for part in parts], dim=2), key)
        torch.testing.assert_close(torch.cat([part[layer][1] for part in parts], dim=2), value)


@pytest.mark.parametrize("taps", [0, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_reads_what_the_flags_say(causal: bool, taps: int) -> None:
    head = random_head(causal=(causal, causal), convolution_taps=taps)
    features = features_of()
    embeds, positions = block_of(2)
    changed = embeds.clone()
    changed[:, 3] += 1.0
    attend = attend_over(head, features)
    moved = (head(embeds, positions, attend) - head(changed, positions, attend)).abs().amax(-1)[0]
    assert ((moved > 1e-6) == torch.tensor([not causal] * 3 + [True] * 2)).all()


def test_windows_cut_the_context_of_their_layers_alone() -> None:
    embeds, positions = block_of(2)
    for windows, reads in (((4, 4), False), ((None, 4), True), ((4, None), True)):
        head = random_head(windows=windows)
        changed = features_of().clone()
        changed[CONTEXT - 5] += 1.0
        out, other = (head(embeds, positions, attend_over(head, given)) for given in (features_of(), changed))
        assert (not torch.equal(out, other)) == reads


@pytest.mark.parametrize("taps", [0, 3])
def test_blocks_of_a_batch_do_not_mix(taps: int) -> None:
    head = random_head(convolution_taps=taps)
    attend = attend_over(head, features_of())
    embeds, positions = block_of(3, blocks=3)
    together = head(embeds, positions, attend)
    assert together.shape == (3, BLOCK, HIDDEN)
    for block in range(3):
        alone = head(embeds[block : block + 1], positions[:1], attend)
        torch.testing.assert_close(together[block : block + 1], alone)


def test_new_convolutions_change_nothing() -> None:
    plain, convolved = random_head(), random_head(convolution_taps=2)
    convolved.load_state_dict(plain.state_dict(), strict=False)
    for layer in convolved.layers:
        for convolution in (layer.attention_conv, layer.mlp_conv):
            torch.nn.init.zeros_(convolution.kernel_projection.weight)
            torch.nn.init.zeros_(convolution.base_kernel)
            torch.nn.init.ones_(convolution.base_kernel[:, 0])
    embeds, positions = block_of(4)
    torch.testing.assert_close(
        convolved(embeds, positions, attend_over(convolved, features_of())),
        plain(embeds, positions, attend_over(plain, features_of())),
    )


@pytest.mark.parametrize("own", [False, True])
def test_logits_come_from_an_output_layer_of_its_own_or_the_target_s(own: bool) -> None:
    head = random_head()
    table = torch.randn(VOCAB, HIDDEN)
    if own:
        head.lm_head = torch.nn.Linear(HIDDEN, 7, bias=False)
    logits = head.logits(torch.randn(2, 3, HIDDEN), lambda hidden: hidden @ table.T)
    assert logits.shape == (2, 3, 7 if own else VOCAB)


@pytest.mark.parametrize(("from_anchor", "drafts"), [(False, 4), (True, 5)])
def test_the_layout_says_how_many_tokens_a_pass_drafts(from_anchor: bool, drafts: int) -> None:
    assert random_head(from_anchor=from_anchor).config.num_drafts == drafts


def test_feature_layers_are_those_of_the_authors() -> None:
    # 0-based layers whose output is read: [1, 9, 17, 25, 33] for Qwen3-8B's 36 layers.
    assert spread_feature_layers(36) == (2, 10, 18, 26, 34)
    assert spread_feature_layers(30, 3) == (2, 15, 28)
    assert spread_feature_layers(36, 1) == (19,)
    assert spread_feature_layers(4) == (3,)
