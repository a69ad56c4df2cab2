"""What only the Triton kernels have: chunks, their random numbers far out, and the backend around them.

Their passes are tested with those of the other backends, as runner ``triton`` of the shared cases.
"""

import pytest
import torch
from cases import DTYPES, assert_same_bits, pair_id

from sassha_fast import reference
from sassha_fast.tables import INDEX, NUMEL, PARAM, ROW_WORDS
from sassha_fast.triton_kernels import probe
from sassha_fast.triton_passes import CHUNK, DTYPES as CODES, KERNEL_DTYPES, Chunks

CPU = torch.device("cpu")


def far_signs(first_chunk, n, index, seed, draw, dtype):
    """What the kernel writes from chunk ``first_chunk`` of a huge tensor on, of which only n elements exist."""
    out = torch.full((n,), torch.nan, dtype=dtype)
    begin = first_chunk * CHUNK
    table = torch.zeros(1, ROW_WORDS, dtype=torch.int64)
    table[0, PARAM] = out.data_ptr() - begin * out.element_size()
    table[0, NUMEL] = begin + n
    table[0, INDEX] = index
    numbers = torch.arange(first_chunk, first_chunk + -(-n // CHUNK))
    chunks = torch.stack((torch.zeros_like(numbers), numbers, torch.zeros_like(numbers)), dim=1).to(torch.int32)
    probe.rademacher[(len(chunks),)](table, chunks, seed, draw, T=KERNEL_DTYPES[CODES[dtype]])
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
@pytest.mark.parametrize(("index", "seed", "draw"), [(0, 0, 0), (2**32 - 1, 2**40 + 9, 2**31 + 1), (7, -1, 2**32 - 1)])
@pytest.mark.parametrize("first", [0, 2**32, 2**39, 2**41 + 3 * CHUNK])
def test_signs_equal_the_reference_for_every_element_also_past_32_bits(first, index, seed, draw, dtype):
    n = 2 * CHUNK + 77
    found = far_signs(first // CHUNK, n, index, seed, draw, dtype)
    assert_same_bits(found, reference.rademacher(found, index, seed, draw, first=first))


def test_chunks_cover_every_element_once_and_partial_results_of_a_group_or_row_are_spans():
    numels, kinds, groups = [5000, 0, 3, CHUNK, 2 * CHUNK + 1, 7], [0, 1, 0, 2, 0, 1], [2, 0, 0, 2, 0, 3]
    chunks = Chunks(numels, kinds, groups, 5, CPU)
    entries = torch.cat([part for _, part in chunks.launches]).tolist()
    assert sorted(place for _, _, place in entries) == list(range(chunks.total))
    for kind, part in chunks.launches:
        assert {kinds[row] for row, _, _ in part.tolist()} == {kind}
    for row, n in enumerate(numels):
        assert sorted(number for r, number, _ in entries if r == row) == list(range(-(-n // CHUNK)))
    for names, spans in ((groups, chunks.group_spans), (range(len(numels)), chunks.row_spans)):
        for name, (begin, end) in enumerate(spans.tolist()):
            places = sorted(place for row, _, place in entries if names[row] == name)
            assert places == list(range(begin, end))
