"""Several ranks: the same training as one, exact evaluation, one log, and an end for all when one dies."""

from dataclasses import astuple
from datetime import timedelta

import numpy as np
import pytest
import torch

from common.data import sampler
from common.errors import UserError
from common.measure import scaling
from common.repository import benchmark_module
from common.run import launch
from common.training import distributed, ranks
from common.training.load import load_config
from common.training.ranks import STORE, RankInfo
from language_bert.data.batches import typical_lengths
from tests.command import one_line, run_ranks, ttt_here
from tests.common.training import train_exactly
from tests.runs import free_port, records

TINY = ("max_duration=20ba", "evaluate_every=10ba", "evaluate_from=10ba", "schedule.warmup=5ba")
pytestmark = pytest.mark.usefixtures("prepared_data")


def rank_infos(world_size):
    return [RankInfo(rank=rank, world_size=world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 12])
def test_the_ranks_of_any_number_see_the_samples_of_one_in_their_order(world_size):
    for batch in (np.arange(12), np.array([5, 3, 8, 1, 0, 2, 9])):
        parts = [sampler.rank_part(batch, rank_info) for rank_info in rank_infos(world_size)]
        assert np.array_equal(np.concatenate(parts), batch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("world_size", "share"), [(1, 7), (3, 2), (8, 2), (8, 4), (8, 56), (64, 7)])
def test_balanced_ranks_share_the_samples_of_a_batch_and_have_about_equal_tokens(world_size, share):
    rng, most, random = np.random.default_rng(0), [], []
    for extra in (0, world_size // 2) * 10:
        batch = rng.permutation(100_000)[: world_size * share + extra]
        lengths = rng.permutation(typical_lengths(10_000, 512))[: len(batch)].astype(np.uint16)  # as stored
        length_of = dict(zip(batch, lengths, strict=True))
        parts = [sampler.balanced_part(batch, lengths, rank_info) for rank_info in rank_infos(world_size)]
        assert sorted(np.concatenate(parts)) == sorted(batch)
        for part, rank_info in zip(parts, rank_infos(world_size), strict=True):
            assert len(part) == len(sampler.rank_part(batch, rank_info))
            assert list(part) == [each for each in batch if each in set(part)]
        loads = [sum(int(length_of[each]) for each in part) for part in parts]
        if extra == 0:
            most.append(max(loads) / np.mean(loads))
            random.append(lengths.reshape(world_size, -1).sum(axis=1).max() / np.mean(loads))
    lengths = typical_lengths(1000, 512)
    work = scaling.Work(
        gradient_bytes=0, sample_s=1, longest=lengths.max() / lengths.mean(), is_balanced=True
    )
    assert (world_size, share) != (8, 56) or 1.12 < np.mean(random) < 1.16
    assert np.mean(most) - 1 <= 1.02 * (scaling.imbalance(work, share, world_size) - 1) < 0.26


def benchmark(name, rank_info, *settings):
    config = load_config(name, "baseline", size="mini", settings=list(settings)).config
    return benchmark_module(name).Benchmark(config, seed=4, rank_info=rank_info)


@pytest.mark.parametrize(("name", "key"), [("language_bert", "input_ids"), ("image_classification", "x")])
def test_three_ranks_train_on_the_batches_of_one(name, key):
    one, *three = (
        next(benchmark(name, rank_info, "global_batch_size=8").train_batches())
        for rank_info in (ranks.SINGLE_RANK, *rank_infos(3))
    )
    assert [batch.num_samples for batch in three] == [2, 3, 3]
    assert torch.equal(torch.cat([batch.inputs[key] for batch in three]), one.inputs[key])
    assert torch.equal(torch.cat([batch.targets["labels"] for batch in three]), one.targets["labels"])
    together = sum(benchmark(name, ranks.SINGLE_RANK).num_targets(batch) for batch in three)
    assert {batch.num_global_targets for batch in (one, *three)} == {together}


def test_every_rank_names_the_most_micro_batches_of_any():
    settings = ("global_batch_size=7", "micro_batch_size=1")
    both = [benchmark("language_bert", rank_info, *settings) for rank_info in rank_infos(2)]
    assert [each.num_micro_batches for each in both] == [3, 4]
    assert [each.num_accumulation_steps for each in both] == [4, 4]


@pytest.mark.parametrize(("name", "key"), [("language_bert", "input_ids"), ("image_classification", "x")])
def test_three_ranks_evaluate_every_sample_once(name, key):
    one, *three = (
        torch.cat([batch.inputs[key] for batch in benchmark(name, rank_info).evaluation_batches()])
        for rank_info in (ranks.SINGLE_RANK, *rank_infos(3))
    )
    assert torch.equal(torch.cat(three), one)


@pytest.mark.parametrize("name", ["language_bert", "image_classification"])
def test_a_rank_without_evaluation_samples_evaluates_none(name):
    one = benchmark(name, ranks.SINGLE_RANK)
    many = [type(one)(one.config, seed=4, rank_info=rank_info) for rank_info in rank_infos(1000)]
    samples = [sample for each in many for sample in each.rank_evaluation_samples]
    assert samples == list(range(many[0].config.data.num_evaluation_samples))
    idle = next(each for each in many if not each.rank_evaluation_samples)
    assert list(idle.evaluation_batches()) == []


TORCHRUN_RANK = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
SRUN_RANK = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "20"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 0, 1, 1)),
        (TORCHRUN_RANK, (3, 1, 8, 1)),
        (TORCHRUN_RANK | {"LOCAL_WORLD_SIZE": "4"}, (3, 1, 8, 4)),
        (SRUN_RANK, (9, 1, 20, 1)),
        (SRUN_RANK | {"SLURM_STEP_TASKS_PER_NODE": "4,8(x2)"}, (9, 1, 20, 8)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}, (0, 0, 1, 1)),  # a batch script
    ],
    ids=["alone", "torchrun", "torchrun, four here", "srun", "srun, eight here", "sbatch"],
)
def test_the_environment_says_which_rank_this_is_and_how_many_share_a_machine(environment, expected):
    assert astuple(ranks.read_rank_info(environment)) == expected


@pytest.mark.parametrize(
    "environment",
    [{"WORLD_SIZE": "2"}, {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_STEP_NUM_TASKS": "x"}],
    ids=str,
)
def test_an_environment_that_is_not_whole_is_refused(environment):
    with pytest.raises(UserError, match="RANK|SLURM"):
        ranks.read_rank_info(environment)


def test_ranks_of_a_slurm_step_meet_on_its_first_host():
    for nodes, host in (
        ("gpu[003-010,12],login", "gpu003"),
        ("a-1,b-2", "a-1"),
        ("n[7]", "n7"),
        ("r[1-2]-ib", "r1-ib"),
    ):
        environment = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "1234567"}
        assert ranks.meeting_point(environment) == (host, "24567")
    assert ranks.meeting_point({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == ("a", "1")
    with pytest.raises(UserError, match="MASTER_ADDR"):
        ranks.meeting_point({})


@pytest.mark.parametrize("port", ["abc", "", "0", "-1", "65536"])
def test_a_meeting_point_has_a_port(port):
    with pytest.raises(UserError, match=f"MASTER_PORT: '{port}' is not a port"):
        ranks.meeting_point({"MASTER_ADDR": "a", "MASTER_PORT": port})


@pytest.mark.filterwarnings("ignore")
def test_a_rank_whose_peers_do_not_come_says_so_while_it_waits_and_when_it_ends(monkeypatch, capfd):
    port = str(free_port())
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(distributed, "WAITING_S", 0.2)
    message = f"127.0.0.1:{port}: the ranks cannot meet here .*; give all machines"
    with pytest.raises(UserError, match=message), distributed.process_group(RankInfo(rank=0, world_size=2)):
        pass
    assert f"waiting for the other ranks at 127.0.0.1:{port}" in capfd.readouterr().err


@pytest.mark.parametrize("host", ["nohost.invalid", "", "x" * 70])
def test_a_meeting_point_without_an_address_is_named_at_once(host, monkeypatch):
    for name, value in {"MASTER_ADDR": host, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(STORE, raising=False)
    message = f"'{host}': cannot be looked up here .*; set MASTER_ADDR"
    with pytest.raises(UserError, match=message), distributed.process_group(RankInfo(rank=0, world_size=2)):
        pass


def test_more_ranks_than_samples_of_a_batch_are_refused(monkeypatch):
    config = load_config("language_bert", "optimized", size="mini", settings=[]).config
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch.hardware, "gpu_names", list)
    assert launch.choose_ranks(config, None) == 1 and launch.choose_ranks(config, 16) == 16
    with pytest.raises(UserError, match="17 ranks cannot divide 16 samples"):
        launch.choose_ranks(config, 17)
    monkeypatch.setattr(launch.hardware, "gpu_names", lambda: ["A100"] * 4)
    assert launch.choose_ranks(config, None) == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert launch.choose_ranks(config, None) == 2
    with pytest.raises(UserError, match="visible: 2"):
        launch.choose_ranks(config, 8)
    for name, value in TORCHRUN_RANK.items():
        monkeypatch.setenv(name, value)
    assert launch.choose_ranks(config, None) == 1
    with pytest.raises(UserError, match="started already"):
        launch.choose_ranks(config, 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The results of train_exactly.py on 4, 2 and 1 ranks, by their number."""
    output = tmp_path_factory.mktemp("trained") / "found.pt"
    run_ranks(4, train_exactly.__name__, output)
    return torch.load(output)


@pytest.mark.slow
def test_two_and_four_ranks_and_micro_batches_train_as_one_does(trained):
    cases = trained[1]["trained"]
    assert cases["whole"]["losses"][-1] < cases["whole"]["losses"][0] - 0.1
    counts = [case["micro_batches"] for case in trained[2]["trained"].values()]
    assert counts == [2, 7, 4, 2, 4]  # of both ranks: 3 and 4 of 7 samples, whole, one by one, in twos
    for found in trained.values():
        for name, case in found["trained"].items():
            expected = cases["lamb" if name.startswith("lamb") else "whole"]
            assert case["drift"] == 0 and case["quality"] == expected["quality"]
            assert case["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-10)
            for kind in ("parameters", "average"):
                for parameter, value in expected[kind].items():
                    assert value.dtype == torch.float64
                    torch.testing.assert_close(case[kind][parameter], value, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_ranks_share_statistics_mistakes_and_what_rank_0_says(trained):
    for num_ranks, found in trained.items():
        mean = (num_ranks + 1) / 2
        assert found["statistics"] == {"mean": 3 * [mean] + 3 * [2 * mean], "rank_0": 3 * [1] + 3 * [2]}
        assert found["largest"] == [num_ranks - 1]
        assert found["error"] == f"here: met by rank {num_ranks - 1}" and found["told"] == "by rank 0"


def on_two_ranks(place, *settings):
    return place.arguments(("language_bert", "optimized", *TINY, *settings), "--nproc", 2, "--seed", 5)


@pytest.mark.slow
def test_two_ranks_write_one_log_that_passes_the_audit(place, ttt):
    settings = ("target=0.01", "micro_batch_size=4", "gradient_compression=bf16")
    done = ttt(on_two_ranks(place, *settings))
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count("masked-LM accuracy") == done.stdout.count("success") == 1
    (path,) = place.results()
    values = {record["key"]: record["value"] for record in records(path)}
    expected = {
        "num_ranks": 2,
        "distributed_backend": "gloo",
        "gradient_compression": "bf16",
        "gradient_accumulation_steps": 2,
        "global_batch_size": 16,
    }
    assert {key: values[key] for key in expected} == expected
    checked = ttt(["check", str(place.results_folder)])
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_a_mistake_that_every_rank_meets_is_told_once(place, ttt):
    line = one_line(ttt(on_two_ranks(place, "methods.unpad.attention=torch_cudnn")))
    assert "methods.unpad.attention: torch_cudnn needs a GPU" in line and "nothing was timed" in line
    assert place.results() == []


@pytest.mark.slow
def test_a_dry_run_describes_a_thousand_ranks():
    command = ["run", "image_classification", "optimized", "--nproc", "1000", "--dry-run"]
    done = ttt_here(*command, "--set", "micro_batch_size=2")
    assert done.returncode == 0, done.stderr
    for expected in (
        "ranks: 1000, one set up in a group without the others; 0.10 GB of float32 gradients exchanged",
        "batch per rank: 2 to 3 of 2,048 samples, in 2 micro-batches of at most 2",
        "evaluation per rank: 50 of 50,000 samples, at most 3 at a time",
        "parameters 0.102, gradients 0.102, optimizer state 0.102, activations of 2 samples 0.",
        "counted without compile",
    ):
        assert expected in done.stdout
