"""The bench's table in its three formats, and the figures that go into it."""

import csv
import json
import time

import jax
import pytest

from minfer_jax import bench_memory
from minfer_jax.bench_bytes import kv_bytes, weight_bytes
from minfer_jax.bench_table import render
from minfer_jax.bench_tests import Rates, all_tests, synthetic_ids
from minfer_jax.model.load import load_model
from tests.helpers import tiny_models
from tests.helpers.tiny_options import EXPERTS

PEER = {"name": "other", "ts_mean": 10.0, "samples_ts": [10.0], "settings": {"a": True, "b": False}}
ROWS = [
    {"model": 'm "1"', "size": 5, "share": None, "ts": 1.005, "list": [1.239], "peers": [PEER]},
    {"model": "a|b", "size": 12345, "share": 2 / 3, "ts": 100.0, "list": [], "peers": [PEER]},
]
COLUMNS = {"model": lambda row: row["model"], "t/s": lambda row: f"{row['ts']:.1f} ± 0.0"}


def test_markdown_is_aligned():
    assert render(ROWS, COLUMNS, "md") == (
        "| model |         t/s |\n"
        "| ----- | ----------: |\n"
        '| m "1" |   1.0 ± 0.0 |\n'
        "| a\\|b  | 100.0 ± 0.0 |\n"
    )


def test_csv_quotes_everything_and_spreads_peers():
    text = render(ROWS, COLUMNS, "csv")
    assert text.splitlines() == [
        '"model","size","share","ts","other ts_mean","other settings"',
        '"m ""1""","5","","1.00","10.00","a=1 b=0"',
        '"a|b","12345","0.67","100.00","10.00","a=1 b=0"',
    ]
    assert next(csv.DictReader(text.splitlines()))["model"] == 'm "1"'


def test_json_rounds_and_keeps_all():
    text = render(ROWS, COLUMNS, "json")
    assert text.startswith('[\n  {\n    "model"')
    first, second = json.loads(text)
    assert list(first) == list(ROWS[0])
    assert (first["list"], first["share"], second["share"]) == ([1.24], None, 0.67)
    assert first["peers"] == [PEER]


def test_names_are_llama_benchs():
    tests = all_tests((512, 2048), (128,), (0, 2048))
    assert [t.name for t in tests] == ["pp512", "pp2048", "tg128", "tg128 @ d2048"]
    assert [t.n_positions for t in tests] == [512, 2048, 129, 2176]


def test_synthetic_ids():
    assert synthetic_ids(4, 100) == [13, 32, 51, 70]  # (i * 7919 + 13) mod 100


def test_mean_and_deviation():
    rates = Rates(samples=(1.0, 2.0, 6.0))
    assert (rates.mean, rates.median) == (3.0, 2.0)
    assert rates.deviation == pytest.approx(7.0**0.5)  # (4 + 1 + 9) / (3 - 1)
    assert Rates(samples=(5.0,)).deviation == 0.0


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_reads_all_weights_but_an_embedding_table(tmp_path, tied):
    file = tiny_models.save(tmp_path, tiny_models.tiny_model("llama", tied=tied))
    cfg, params = load_model(file)
    table = sum(leaf.nbytes for leaf in jax.tree.leaves(params.token_embd))
    assert table == 96 * 64 * 4
    assert weight_bytes(params, cfg) == params.nbytes - (0 if tied else table)


def test_a_token_reads_the_experts_that_it_uses(tmp_path):
    data = tiny_models.tiny_model("llama", tied=True, **EXPERTS)
    cfg, params = load_model(tiny_models.save(tmp_path, data))
    all_experts = 3 * 6 * (3 * 96 * 64) * 4  # layers, experts, weights of one, bytes
    assert weight_bytes(params, cfg) == params.nbytes - all_experts * 4 // 6  # 2 of 6 are used


def test_a_sliding_layer_reads_no_more_than_its_window(tmp_path):
    file = tiny_models.save(tmp_path, tiny_models.tiny_model("gemma3"))
    cfg, _ = load_model(file, precision="highest")  # a float32 cache
    row = 2 * cfg.n_head_kv * cfg.head_dim * 4
    assert [spec.sliding for spec in cfg.layers] == [True, True, False, True]
    assert kv_bytes(cfg, 0, 1) == row * 4 * 1
    assert kv_bytes(cfg, 20, 1) == row * (20 + 3 * 8)
    assert kv_bytes(cfg, 7, 3) == row * (8 + 3 * (7 + 8 + 8) / 3)


def test_reading_takes_the_best_pass_over_all_of_the_buffer(monkeypatch):
    passes = iter([2.0, 0.5, 1.0, 3.0, 4.0])
    seen = []

    def one(shares):
        seen.append([s.size for s in shares])
        return next(passes)

    monkeypatch.setattr(bench_memory, "_pass_seconds", one)
    monkeypatch.setattr(bench_memory, "_SECONDS", 0.0)
    assert bench_memory.read_rate(3, 1 << 20) == (1 << 20) / 0.5
    assert seen == [[43691, 43691, 43690]] * 5


def test_the_ceiling_is_measured_in_another_process_and_soon():
    begin = time.perf_counter()
    rate = bench_memory.ceiling(2)
    assert 1e8 < rate < 1e13
    assert time.perf_counter() - begin < 30


def test_a_ceiling_that_cannot_be_measured_is_one_line(monkeypatch):
    monkeypatch.setattr(bench_memory.sys, "executable", "/no/such/python")
    with pytest.raises(bench_memory.CeilingError, match=r"could not be measured.*/no/such/python"):
        bench_memory.ceiling(1)
