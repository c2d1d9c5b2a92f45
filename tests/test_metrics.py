"""What a server counts, in a worked example by a clock that a test turns."""

import grpc
import pytest
from doubles import FakeReplica
from prometheus_client.parser import text_string_to_metric_families

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import metrics
from fastgen_jax.serving.errors import Refusal, invalid
from fastgen_jax.serving.metrics import Metrics

ONE = {"model_name": "m"}


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(metrics, "time", found)
    return found


def samples(counted: Metrics) -> dict[tuple, float]:
    """Every sample of /metrics by its name, without ours in front, and its labels."""
    families = text_string_to_metric_families(counted.text().decode())
    return {
        (sample.name.removeprefix("fastgen:"), *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def of(found: dict[tuple, float], name: str, **labels: str) -> float:
    return found[name, *sorted({**ONE, **labels}.items())]


def accepted(num_prompt_tokens: int) -> pb.GenerateEvent:
    return pb.GenerateEvent(accepted=pb.Accepted(num_prompt_tokens=num_prompt_tokens))


def delta(num_tokens: int, index: int = 0) -> pb.GenerateEvent:
    return pb.GenerateEvent(delta=pb.Delta(index=index, text="x", token_ids=[1] * num_tokens))


def response(reason: str, queue: float | None = None) -> pb.GenerateEvent:
    return pb.GenerateEvent(response=pb.Response(finish_reason=reason, timings=pb.Timings(queue=queue)))


def test_one_request(clock):
    counted = Metrics()
    request = counted.request("m", "r")
    story = [
        (0.5, accepted(7)),
        (2.0, delta(1)),  # the first token after 2 s
        (2.5, delta(1)),  # a gap of 0.5 s
        (3.5, delta(2)),  # two tokens at once: gaps of 0.5 s each
        (3.5, delta(0)),  # text alone is no token
        (3.5, response("length", queue=1.5)),
    ]
    for moment, event in story:
        clock.now = 100 + moment
        request.event(event)
    clock.now = 104.0
    request.ended()
    request.close()
    found = samples(counted)
    for name, total, count in [
        ("time_to_first_token_seconds", 2.0, 1),
        ("inter_token_latency_seconds", 1.5, 3),
        ("e2e_request_latency_seconds", 4.0, 1),
        ("request_queue_time_seconds", 1.5, 1),
    ]:
        assert (of(found, f"{name}_sum"), of(found, f"{name}_count")) == (total, count), name
    assert of(found, "time_to_first_token_seconds_bucket", le="1.0") == 0
    assert of(found, "time_to_first_token_seconds_bucket", le="2.5") == 1
    assert of(found, "prompt_tokens_total") == 7
    assert of(found, "generation_tokens_total") == 4
    assert of(found, "request_success_total", finished_reason="length") == 1
    assert ("request_aborted_total", *ONE.items()) not in found


def test_gaps_of_milliseconds_are_told_apart(clock):
    counted = Metrics()
    request = counted.request("m", "r")
    for moment in (0.0, 0.0009, 0.003):
        clock.now = 100 + moment
        request.event(delta(1))
    found = samples(counted)
    at_most = [of(found, "inter_token_latency_seconds_bucket", le=le) for le in ("0.001", "0.0025", "0.005")]
    assert at_most == [1, 2, 2]


def test_tokens_are_counted_as_they_come_and_each_sample_has_its_own_gaps(clock):
    counted = Metrics()
    request = counted.request("m", "r")
    for moment, event in [(1, delta(3)), (2, delta(1, index=1)), (5, delta(1)), (6, delta(1, index=1))]:
        clock.now = 100.0 + moment
        request.event(event)
    found = samples(counted)
    assert of(found, "generation_tokens_total") == 6
    # Tokens of sample 0: three at once, one 4 s later. Of sample 1: one, one 4 s later.
    assert (of(found, "inter_token_latency_seconds_sum"), of(found, "inter_token_latency_seconds_count")) == (8, 4)
    assert (of(found, "time_to_first_token_seconds_sum"), of(found, "time_to_first_token_seconds_count")) == (1, 1)


@pytest.mark.parametrize(
    ("refusal", "counter", "labels"),
    [
        (None, "request_aborted_total", {}),
        (invalid("wrong"), "request_rejected_total", {"reason": "invalid"}),
        (
            Refusal(grpc.StatusCode.UNAVAILABLE, "", code="replica_lost"),
            "request_failed_total",
            {"code": "replica_lost"},
        ),
        (Refusal(grpc.StatusCode.INTERNAL, "a fault"), "request_failed_total", {"code": "internal"}),
    ],
    ids=["left", "invalid", "lost", "fault"],
)
def test_how_requests_end_that_do_not_succeed(clock, refusal, counter, labels):
    counted = Metrics()
    request = counted.request("m", "r")
    request.event(accepted(7))
    request.event(delta(1))
    if refusal is not None:
        request.refused(refusal)
    request.close()
    found = samples(counted)
    assert of(found, counter, **labels) == 1
    assert ("e2e_request_latency_seconds_count", *ONE.items()) not in found
    assert of(found, "generation_tokens_total") == 1


def test_a_request_that_was_aborted_by_name_has_a_response_and_counts_as_aborted():
    counted = Metrics()
    request = counted.request("m", "r")
    request.event(response("abort"))
    request.ended()
    request.close()
    found = samples(counted)
    assert of(found, "request_aborted_total") == 1
    assert of(found, "request_success_total", finished_reason="abort") == 1


def test_rejections_and_retries():
    counted = Metrics()
    counted.rejected("m", "queue_full")
    counted.retried("m")
    found = samples(counted)
    assert of(found, "request_rejected_total", reason="queue_full") == 1
    assert of(found, "request_retries_total") == 1


def test_retry_after_is_how_long_those_in_front_would_take(clock):
    counted = Metrics()
    assert counted.seconds_until_begun("m", 50) == 1.0  # nothing has begun yet
    for _ in range(5):
        counted.began("m", clock.now)
        clock.now += 0.5
    assert counted.seconds_until_begun("m", 20) == 10.0
    assert counted.seconds_until_begun("m", 0) == 1.0
    assert counted.seconds_until_begun("m", 10**6) == 60.0
    assert counted.seconds_until_begun("another", 20) == 1.0


def test_replicas():
    busy = pb.ReplicaStats(
        model="m",
        address="h:1",
        state="ready",
        running=3,
        waiting=2,
        blocks=100,
        free_blocks=25,
        steps=10,
        tokens=90,
        padding=30,
        prompt_tokens=60,
        cached_tokens=15,
        preemptions=4,
        compiled_after_warm_up=1,
        outstanding_tokens=77,
        bucket_times=[
            pb.BucketTime(tokens=16, steps=7, seconds=0.7),
            pb.BucketTime(tokens=32, steps=3, seconds=0.9),
        ],
    )
    counted = Metrics()
    counted.watch(lambda: [busy, pb.ReplicaStats(model="m", address="h:2", state="starting")])
    found = samples(counted)
    expected = {
        "replica_up": (1, 0),
        "kv_cache_usage_perc": (0.75, 0),
        "batch_fill": (0.75, 0),
        "padding_share": (0.25, 0),
        "num_requests_running": (3, 0),
        "num_requests_waiting": (2, 0),
        "outstanding_tokens": (77, 0),
        "compiled_after_warm_up": (1, 0),
        "num_preemptions_total": (4, 0),
        "steps_total": (10, 0),
        "step_tokens_total": (90, 0),
        "step_padding_tokens_total": (30, 0),
        "prefix_cache_queries_total": (60, 0),
        "prefix_cache_hits_total": (15, 0),
    }
    for name, values in expected.items():
        assert tuple(of(found, name, replica=address) for address in ("h:1", "h:2")) == values, name
    for bucket, steps, seconds in [("16", 7, 0.7), ("32", 3, 0.9)]:
        assert of(found, "step_seconds_count", replica="h:1", bucket=bucket) == steps
        assert of(found, "step_seconds_sum", replica="h:1", bucket=bucket) == pytest.approx(seconds)


def test_replicas_are_asked_anew_each_time():
    replica = FakeReplica("a")
    counted = Metrics()
    counted.watch(lambda: [replica.stats])
    for state, is_up in [("ready", 1), ("lost", 0), ("ready", 1)]:
        replica.stats.state = state
        assert samples(counted)["replica_up", ("model_name", "tiny"), ("replica", "a")] == is_up
