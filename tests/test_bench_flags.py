"""What the bench's command line comes to."""

import pytest

from minfer_jax.bench_flags import FLAGS, Options, help_text, parse
from minfer_jax.bench_peer import PACKAGES
from minfer_jax.bench_sweep import Variant
from minfer_jax.usage import UsageError


def options(*words: str) -> Options:
    return parse(["bench", *words])


def test_defaults():
    assert options() == Options(
        model="smollm2",
        n_prompt=(512,),
        n_gen=(128,),
        depths=(0,),
        repeat=5,
        output="md",
        threads=None,
        precision="default",
        variants=(Variant(),),
        prefill_chunk=512,
        peers=(),
        peer_python=None,
        llama_bench=None,
        compiling=False,
    )


def test_all_flags_in_any_order():
    words = (
        "-p 512,2048 x.gguf -n 64,128 -d 0,2048 -r 3 -o json -t 2 --n-ctx 4096 --vs ik_llama.cpp"
    )
    words += " --cache-type bf16 --prefill-chunk 64 --device gpu --kernels xla"
    words += " --steps-per-dispatch 8"
    more = "--vs llama.cpp --vs-python /v/bin/python --precision highest --vs ik_llama.cpp"
    assert options(*words.split(), *more.split()) == Options(
        model="x.gguf",
        n_prompt=(512, 2048),
        n_gen=(64, 128),
        depths=(0, 2048),
        repeat=3,
        output="json",
        threads=2,
        precision="highest",
        variants=(Variant(n_ctx=4096, cache_type="bf16"),),
        prefill_chunk=64,
        device="gpu",
        kernels="xla",
        steps_per_dispatch=8,
        peers=("ik_llama.cpp", "llama.cpp"),
        peer_python="/v/bin/python",
        llama_bench=None,
        compiling=False,
    )


def test_what_is_compiled_is_every_combination():
    found = options("--compile", "--n-ctx", "16,32,16", "--layers", "unrolled,looped").variants
    assert [(v.n_ctx, v.cache_type, v.layers) for v in found] == [
        (16, None, "unrolled"),
        (16, None, "looped"),
        (32, None, "unrolled"),
        (32, None, "looped"),
    ]


def test_drafts_are_measured_alone():
    assert not options().drafting
    found = options("--draft-ngram", "--draft-max", "5", "-n", "64")
    assert (found.drafting, found.draft_ngram, found.draft, found.draft_max) == (
        True,
        True,
        None,
        5,
    )
    assert (options("--draft", "x").draft, options("--draft", "x").drafting) == ("x", True)
    for words, said in (
        ("--draft x --draft-ngram", "give one of them"),
        ("--draft-ngram --compile", "leave out --compile"),
        ("--draft x --vs llama.cpp", "leave out --compile, --vs"),
        ("--draft-max 3", "--draft-max needs"),
        ("--draft-ngram --draft-max 0", "--draft-max is 0"),
        ("--draft-ngram -n 0", "-n is 0"),
    ):
        with pytest.raises(UsageError, match=said):
            options(*words.split())


def test_zero_leaves_a_test_out_and_a_number_counts_once():
    assert options("-p", "0").n_prompt == ()
    assert options("-n=0", "-p", "7,0,7").n_prompt == (7,)
    assert options("-n", "0").n_gen == ()


def test_a_llama_bench_is_llama_cpp():
    assert options("--llama-bench", "./b").peers == ("llama.cpp",)
    assert options("--llama-bench", "./b", "--vs", "llama.cpp").peers == ("llama.cpp",)


def test_compiling_is_repeated_only_when_told():
    assert options("--compile").repeat == 1
    assert options("--compile", "-r", "4").repeat == 4
    assert options("--compile", "-p", "0", "-n", "0").compiling


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("-p 0 -n 0", "-p and -n are both 0"),
        ("-r 0", "--repetitions is 0, expected 1 or more"),
        ("-t 0", "--threads is 0, expected 1"),
        ("-p -3", "-p has '-3', expected whole numbers from 0"),
        ("-p x", "-p has 'x'"),
        ("-p 5,", "-p has ''"),
        ("-n 1.5", "-n has '1.5'"),
        ("-d ٣", "-d has"),
        ("-p 99999999999999999999", "-p has '9999"),
        ("-p 2147483648", "to 2147483647"),
        ("--n-ctx 0", "--n-ctx has '0', expected whole numbers from 1"),
        ("--n-ctx 16,32", "several --n-ctx or --cache-type need --compile"),
        ("--cache-type f16,q8_1", "--cache-type is 'q8_1' (did you mean 'q8_0'?)"),
        ("--layers looped", "--layers needs --compile"),
        ("--plot a.png", "--plot needs --compile"),
        (f"--compile --n-ctx {','.join(map(str, range(1, 66)))}", "65 combinations"),
        ("-o xml", "--output is 'xml', expected one of md, csv, json"),
        (
            "--vs llama_cpp",
            "--vs is 'llama_cpp' (did you mean 'llama.cpp'?), expected one of llama",
        ),
        ("--vs vllm", "--vs is 'vllm', expected one of llama.cpp, ik_llama.cpp"),
        ("--cache-type f8", "--cache-type is 'f8', expected one of"),
        ("--prefill-chunk 0", "--prefill-chunk is 0"),
        ("--device cuda", "--device is 'cuda', expected one of auto, cpu, gpu, metal"),
        ("--kernels triton", "--kernels is 'triton', expected one of auto, xla, pallas"),
        ("--steps-per-dispatch 17", "--steps-per-dispatch is 17, expected 1 to 16"),
        ("--precision low", "--precision is 'low', expected one of"),
        ("a.gguf b.gguf", "2 models, expected one: 'b.gguf' is left"),
        ("--bogus", "there is no flag '--bogus'"),
        ("-r", "Missing value for flag -r"),
        ("--compile --vs llama.cpp", "--compile times our own"),
    ],
)
def test_wrong_usage_is_told_in_one_line(words, match):
    with pytest.raises(UsageError) as caught:
        parse(["bench", *words.split()])
    assert match in str(caught.value)
    assert str(caught.value).isprintable()


def test_help_names_every_flag():
    lines = help_text().splitlines()
    rows = [line for line in lines if line.startswith("  -")]
    assert len(rows) == len(FLAGS) and len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for flag in FLAGS:
        assert [row for row in rows if f"--{flag.name} " in row and flag.text in row], flag
    assert all(name in help_text() for name in PACKAGES)
