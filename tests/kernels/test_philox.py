"""The random numbers: the published generator, the same bits everywhere, and no correlation that can be seen."""

import pytest
import torch
from cases import DTYPES, assert_same_bits
from tolerances import mean_bound

from sassha_fast import reference

pytestmark = pytest.mark.usefixtures("native_ops")
OPS = torch.ops.sassha_fast

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
STREAMS = [(0, 0, 0), (3, 17, 41), (2**32 - 1, 2**40 + 9, 2**31 + 1), (7, -1, 2**32 - 1)]  # index, seed, draw
N_STATISTICS = 1 << 20


def as_int64(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def signs_of_words(words: torch.Tensor) -> torch.Tensor:
    return (1 - 2 * ((words.unsqueeze(-1) >> torch.arange(32)) & 1)).flatten()


def kernel_signs(n: int, index: int, seed: int, draw: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((n,), torch.nan, dtype=dtype)
    OPS.rademacher_([out], [index], seed, draw)
    return out


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, result):
    block = torch.tensor([as_int64(counter[0] | counter[1] << 32)])
    words = reference.philox(block, index=counter[2], draw=counter[3], seed=key[0] | key[1] << 32)
    assert words.tolist() == [list(result)]


def test_first_kernel_signs_are_the_bits_of_the_known_answer():
    words = torch.tensor(KNOWN_ANSWERS[0][2])
    assert_same_bits(kernel_signs(128, 0, 0, 0), signs_of_words(words).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("index", "seed", "draw"), STREAMS)
def test_kernel_signs_equal_the_reference_for_every_element(index, seed, draw, dtype):
    sizes = (0, 1, 127, 128, 129, 16384, 40001)
    outs = [torch.full((n,), torch.nan, dtype=dtype) for n in sizes]
    OPS.rademacher_(outs, [index] * len(outs), seed, draw)
    assert_same_bits(outs, [reference.rademacher(out, index, seed, draw) for out in outs])


@pytest.mark.parametrize("first", [0, 1, 127, 2**32 + 77, 2**39 - 64, 2**39 + 5])
def test_signs_of_a_part_are_numbered_by_global_element(first):
    index, seed, draw, n = 6, 2**33 + 1, 12, 300
    elements = torch.arange(first, first + n)
    words = reference.philox(elements // 128, index, draw, seed)
    word = words.gather(-1, (elements % 128 // 32).unsqueeze(-1)).squeeze(-1)
    expected = 1.0 - 2.0 * ((word >> (elements % 32)) & 1)
    assert_same_bits(reference.rademacher(torch.empty(n), index, seed, draw, first=first), expected)


def test_high_half_of_the_block_number_changes_the_signs():
    low, high = (reference.rademacher(torch.empty(256), 0, 0, 0, first=first) for first in (0, 2**39))
    assert (low != high).any()


@pytest.mark.cpu
def test_signs_do_not_depend_on_thread_count(restore_threads):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(kernel_signs(200_003, 1, 2, 3))
    assert_same_bits(results[1], results[0])


def test_signs_do_not_depend_on_splitting_the_list():
    shapes, indices = [(50_000,), (3, 43), (0,), (20_000,)], [4, 9, 2, 7]
    together = [torch.empty(shape) for shape in shapes]
    OPS.rademacher_(together, indices, 5, 6)
    for i in reversed(range(len(shapes))):
        alone = torch.empty(shapes[i])
        OPS.rademacher_([alone], [indices[i]], 5, 6)
        assert_same_bits(alone, together[i])


@pytest.mark.parametrize("changed", ["index", "seed_low", "seed_high", "draw"])
def test_each_number_of_a_stream_changes_the_signs(changed):
    seed = {"seed_low": 1, "seed_high": 1 << 32}.get(changed, 0)
    other = kernel_signs(256, int(changed == "index"), seed, int(changed == "draw"))
    assert (other != kernel_signs(256, 0, 0, 0)).any()


def test_signs_are_balanced():
    z = kernel_signs(N_STATISTICS, 0, 1, 2, torch.float64)
    assert z.abs().eq(1).all()
    assert z.mean().abs() <= mean_bound(N_STATISTICS)


def test_signs_are_uncorrelated_at_short_lags():
    z = kernel_signs(N_STATISTICS, 0, 1, 2, torch.float64)
    for lag in (*range(1, 65), 96, 127, 128, 129, 256, 16384):
        n = N_STATISTICS - lag
        assert (z[lag:] * z[:n]).mean().abs() <= mean_bound(n), f"lag {lag}"


def test_signs_are_uncorrelated_across_draws_indices_and_seeds():
    base = kernel_signs(N_STATISTICS, 10, 100, 1000, torch.float64)
    for index, seed, draw in (
        *((10, 100, 1000 + k) for k in (1, 2, 3, 10)),
        *((10 + k, 100, 1000) for k in (1, 2, 3, 64)),
        *((10, 100 + k, 1000) for k in (1, 2, 1 << 32)),
        (1000, 100, 10),
    ):
        other = kernel_signs(N_STATISTICS, index, seed, draw, torch.float64)
        assert (base * other).mean().abs() <= mean_bound(N_STATISTICS), f"index {index}, seed {seed}, draw {draw}"


def test_every_bit_of_a_block_is_balanced():
    z = kernel_signs(N_STATISTICS, 2, 3, 4, torch.float64).view(-1, 128)
    assert z.mean(0).abs().max() <= mean_bound(len(z))


def test_rounding_noise_is_independent_of_the_signs():
    like = torch.empty(N_STATISTICS // 16)
    noise = reference.rounding_noise(like, 3, 4, 5, reference.ASCENT_NOISE)
    of_noise = (1 - 2 * ((noise.unsqueeze(-1) >> torch.arange(16)) & 1)).flatten().double()
    of_signs = reference.rademacher(torch.empty(N_STATISTICS, dtype=torch.float64), 3, 4, 5)
    assert (of_noise * of_signs).mean().abs() <= mean_bound(N_STATISTICS)


def test_rounding_noise_is_uniform_on_sixteen_bits():
    n = 1 << 18
    noise = reference.rounding_noise(torch.empty(n), 0, 1, 2, reference.UPDATE_NOISE).double()
    assert noise.min() >= 0
    assert noise.max() <= 0xFFFF
    uniform = noise / 2**16
    assert (uniform.mean() - 0.5).abs() <= mean_bound(n, 12**-0.5) + 2.0**-17
    assert (uniform.square().mean() - 1 / 3).abs() <= mean_bound(n, (4 / 45) ** 0.5) + 2.0**-16
