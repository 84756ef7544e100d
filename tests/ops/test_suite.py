"""The operator suite: silence where a library is right, a name and a pattern for each way to be wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import broken
import pytest
import torch

from harness.errors import UsageError
from harness.ops.arithmetic import Arithmetic, parse_arithmetic
from harness.ops.families import FAMILIES, SPECS
from harness.ops.suite import check, library, operator_suite

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

SILENT = """
import torch
from harness.ops.arithmetic import Arithmetic
from harness.ops.families import SPECS
from harness.ops.suite import library, operator_suite
found = operator_suite(library(SPECS), device="cpu", dtypes=[torch.bfloat16], arithmetic=Arithmetic(), full=False)
print("\\n".join(r.words() for r in found if r.bad))
"""


REFUSED = "pack_vnni2 is only supported when avx512 is supported"
"""What torch 2.13 itself raises without AVX-512 for attention in bfloat16 of 64 tokens and more: told, and true."""


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_library_on_a_cpu_is_right(dtype):
    """Every operator of torch on a CPU is within its budget, in each dtype, and repeats itself.

    But for rows that are added to one place by several threads, whose order torch leaves open in float32.
    """
    found = operator_suite(library(SPECS), device="cpu", dtypes=[dtype], arithmetic=Arithmetic(), full=False)
    assert len(found) == len(SPECS)
    assert [r.words() for r in found if r.bad] == []
    assert {r.operator for r in found if r.counts["not_repeated"]} <= {"index_put_add"}


@pytest.mark.parametrize("setting", ["ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=AVX2"])
def test_the_library_is_right_with_other_instructions(setting):
    """Honest rounding by other instructions stays within the budgets."""
    name, _, value = setting.partition("=")
    words = {**os.environ, "OMP_NUM_THREADS": "1", name: value}
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, env=words, check=False)
    assert done.returncode == 0, done.stderr
    wrong = [line for line in done.stdout.split("\n") if line.startswith("  ") and REFUSED not in line]
    assert wrong == []


@pytest.mark.parametrize(("name", "call", "dtype", "words"), [
    ("softmax", broken.softmax_of_dense, BF16, "only for non-contiguous input (strided, transposed)"),
    ("softmax", broken.softmax_wrong_in_a_band, BF16, "wrong only for widths 1025..2048"),
    ("softmax", broken.softmax_that_swallows_nan, F32, "only for inputs that are special: masked, nonfinite"),
    ("softmax", broken.softmax_without_a_maximum, F32, "only for inputs that are special: large"),
    ("softmax", broken.softmax_in_place, F32, "elements of the inputs' memory were changed"),
    ("topk", broken.topk_with_a_wrong_last, BF16, "only the last index of a row"),
    ("topk", broken.topk_with_an_index_twice, F32, "ties"),
    ("copy", broken.copy_that_clobbers, F32, "1 elements beside the output were overwritten"),
    ("attention", broken.attention_of_all_when_masked, F32, "only for inputs that are special: fully masked"),
    ("attention", broken.attention_nan_when_masked, BF16, "expected 0, found nan"),
    ("index_put_add", broken.add_that_loses_duplicates, F32, "right for no duplicates"),
    ("cumsum", broken.cumsum_in_the_dtype, BF16, "wrong only for widths from"),
    ("matmul", broken.matmul_sums_in_the_dtype, BF16, "times the error that rounding allows"),
    ("argmax", broken.argmax_beyond_16_bits, F32, "rows beyond 65535"),
    ("rms_norm", broken.rms_norm_in_the_dtype, F16, "times the error that rounding allows"),
    ("from_mxfp4", broken.mxfp4_high_nibble_first, F32, "in every case"),
], ids=lambda x: getattr(x, "__name__", None))  # fmt: skip
def test_each_way_to_be_wrong_is_found_and_told(name, call, dtype, words):
    """A broken operator is found, its first wrong element is told, and what its wrong cases share is named."""
    (result,) = check(name, call, dtype=dtype, full=False)
    assert result.bad
    assert name in result.words()
    assert words in result.words()


@pytest.mark.parametrize(("name", "call", "dtype"), [
    ("topk", broken.topk_ties_otherwise, BF16),
    ("matmul", broken.matmul_split_k, BF16),
    ("matmul", broken.matmul_split_k, F32),
    ("attention", broken.attention_online, BF16),
    ("attention", broken.attention_online, F32),
], ids=lambda x: getattr(x, "__name__", None))  # fmt: skip
def test_what_is_only_computed_otherwise_is_right(name, call, dtype):
    """Ties in another order, sums split in blocks, softmax with a running maximum: nothing is reported."""
    (result,) = check(name, call, dtype=dtype, full=False)
    assert not result.bad, result.words()


def test_what_a_device_declares_is_allowed():
    """Sums in bfloat16 and flushed subnormals are wrong for a device that is silent, and right for one that says so."""
    declared = parse_arithmetic({"accumulate": "bfloat16"})
    assert not check("matmul", broken.matmul_sums_in_the_dtype, dtype=BF16, full=False, arithmetic=declared)[0].bad
    flushed = Arithmetic(subnormals="flushed")
    assert check("exp", broken.exp_that_flushes, dtype=F16, full=False)[0].bad
    assert not check("exp", broken.exp_that_flushes, dtype=F16, full=False, arithmetic=flushed)[0].bad


def test_a_declaration_outside_of_the_language_is_refused():
    """An unknown key or word of a declaration, and an operator that the suite does not have, name what is near."""
    with pytest.raises(UsageError, match="accumulate"):
        parse_arithmetic({"acumulate": "bfloat16"})
    with pytest.raises(UsageError, match="expected float64"):
        parse_arithmetic({"accumulate": "bf16"})
    with pytest.raises(UsageError, match="softmax"):
        check("softmaks")


def test_noise_within_the_budget_is_told_and_not_wrong():
    """Two equal calls that differ by rounding alone are right, and their difference is counted."""
    (result,) = check("sum", broken.LeftToChance(), dtype=F32, full=False)
    assert not result.bad, result.words()
    assert result.counts["not_repeated"] > 0


def test_an_operator_that_raises_is_told_in_its_own_words():
    """What an operator raises is part of the result; it does not end the suite."""

    def refuses(x, dim):
        raise RuntimeError("no kernel image is available")

    (result,) = check("softmax", refuses, full=False)
    assert result.raised == result.cases
    assert "no kernel image" in result.words()


def test_the_suite_has_every_family_and_a_source_for_each_budget():
    """Each operator says where its formula and its budget are from; names are unique."""
    wanted = {"matrix", "norms", "activations", "rotary", "softmax", "choices", "sums", "places", "copies"}
    assert wanted | {"convolution", "attention", "recurrent", "formats", "elementwise"} == set(FAMILIES)
    assert all(len(spec.source) > 5 for spec in SPECS.values())
    assert sorted(o.name for o in library(SPECS)) == sorted(SPECS)


def test_results_are_plain_facts():
    """A result, of a wrong operator too, is JSON without NaN, and its message reads like a report."""
    import json

    wrong = check("softmax", broken.softmax_that_swallows_nan, full=False)[0]
    facts = json.loads(json.dumps(wrong.facts(), allow_nan=False))
    assert facts["wrong_cases"] == wrong.wrong_cases
    assert "softmax in float32 on cpu" in facts["message"]
    assert operator_suite([], device="cpu", dtypes=[F32], arithmetic=Arithmetic(), full=False) == []


@pytest.mark.filterwarnings("ignore:Warning only once:UserWarning")
def test_a_broken_kernel_behind_torchs_own_name_is_found():
    """What a device registers for an aten operator is what is tested: no port need offer it."""

    def silu(x):
        y = x * torch.sigmoid(x)
        return y * 1.02 if x.shape[-1] >= 1025 else y

    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu", silu, "CPU", allow_override=True)
    try:
        (result,) = check("silu", dtype=F32, full=False)
    finally:
        kernels._destroy()
    assert "wrong only for widths from 1025 on" in result.words()
    assert not check("silu", dtype=F32, full=False)[0].bad
