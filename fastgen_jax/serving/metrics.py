"""What a router counts, for Prometheus. Names and units are vLLM's with our prefix, so that dashboards port."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.errors import Refusal

log = logging.getLogger("fastgen_jax.serving.requests")

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480)

_REMEMBERED_STARTS = 64
_RETRY_RANGE_S = (1.0, 60.0)


class Metrics:
    """The counters of one router. `watch` adds what its replicas say of themselves."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._starts: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_STARTS))
        self.ttft = self._histogram("time_to_first_token_seconds", "from a request to its first token", TTFT_BUCKETS)
        self.gap = self._histogram("inter_token_latency_seconds", "between two tokens of a sample", GAP_BUCKETS)
        self.latency = self._histogram("e2e_request_latency_seconds", "from a request to its end", LATENCY_BUCKETS)
        self.queue = self._histogram("request_queue_time_seconds", "until a replica's first step for it", TTFT_BUCKETS)
        about = "by how much the front's event loop was late"
        self.loop_lag = Histogram("fastgen:event_loop_lag_seconds", about, registry=self.registry, buckets=LAG_BUCKETS)
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of requests that began")
        self.generated = self._counter("generation_tokens", "tokens that were generated")
        self.success = self._counter("request_success", "samples that ended, by why", "finished_reason")
        self.aborted = self._counter("request_aborted", "requests whose client went away or that were aborted")
        self.failed = self._counter("request_failed", "requests that ended with an error, by its code", "code")
        self.refused = self._counter("request_rejected", "requests that were not let in, by why", "reason")
        self.retries = self._counter("request_retries", "requests tried on another replica")

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"fastgen:{name}", about, ("model_name",), registry=self.registry, buckets=buckets)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"fastgen:{name}", about, ("model_name", *labels), registry=self.registry)

    def watch(self, replicas: Callable[[], Iterable[pb.ReplicaStats]]) -> None:
        """Report what replicas, asked for anew each time, say of themselves."""
        self.registry.register(_Replicas(replicas))  # type: ignore[arg-type]

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def request(self, model: str, request_id: str) -> "Observed":
        """A request that has been let in."""
        return Observed(self, model, request_id)

    def rejected(self, model: str, reason: str) -> None:
        self.refused.labels(model, reason).inc()

    def retried(self, model: str) -> None:
        self.retries.labels(model).inc()

    def began(self, model: str, moment: float) -> None:
        """A request got its first token."""
        self._starts[model].append(moment)

    def seconds_until_begun(self, model: str, num_waiting: int) -> float:
        """About how long a request that came after so many others would wait for its first token."""
        low, high = _RETRY_RANGE_S
        if len(starts := self._starts[model]) < 2:
            return low
        seconds_each = (time.monotonic() - starts[0]) / len(starts)
        return round(min(max(num_waiting * seconds_each, low), high), 1)


class Observed:
    """One request as it passes; `close` in any case, after `ended` or `refused` if it came to that."""

    def __init__(self, metrics: Metrics, model: str, request_id: str) -> None:
        self._metrics, self._model, self._request_id = metrics, model, request_id
        self._gap, self._generated = metrics.gap.labels(model), metrics.generated.labels(model)
        self._start = time.monotonic()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._prompt_tokens = self._generated_tokens = 0
        self._reasons: list[str] = []
        self._end = "aborted"

    def event(self, event: pb.GenerateEvent) -> None:
        if event.HasField("delta"):
            self._delta(event.delta)
        elif event.HasField("response"):
            self._response(event.response)
        else:
            self._prompt_tokens = event.accepted.num_prompt_tokens

    def _delta(self, delta: pb.Delta) -> None:
        if not (num_tokens := len(delta.token_ids)):
            return
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.began(self._model, now)
            self._metrics.ttft.labels(self._model).observe(now - self._start)
        last = self._last.get(delta.index)
        self._last[delta.index] = now
        each = 0.0 if last is None else (now - last) / num_tokens
        for _ in range(num_tokens - (last is None)):  # several come together in a stream that lags
            self._gap.observe(each)
        self._generated_tokens += num_tokens
        self._generated.inc(num_tokens)

    def _response(self, response: pb.Response) -> None:
        self._reasons.append(response.finish_reason)
        self._metrics.success.labels(self._model, response.finish_reason).inc()
        if response.timings.HasField("queue"):
            self._metrics.queue.labels(self._model).observe(response.timings.queue)

    def ended(self) -> None:
        self._end = "ok"
        if "abort" in self._reasons:
            self._end = "aborted"

    def refused(self, refusal: Refusal) -> None:
        self._end = refusal.code or refusal.status.name.lower()
        if refusal.status == grpc.StatusCode.INVALID_ARGUMENT:
            self._metrics.rejected(self._model, "invalid")
        else:
            self._metrics.failed.labels(self._model, self._end).inc()

    def close(self) -> None:
        seconds = time.monotonic() - self._start
        self._metrics.prompt_tokens.labels(self._model).inc(self._prompt_tokens)
        if self._end == "ok":
            self._metrics.latency.labels(self._model).observe(seconds)
        elif self._end == "aborted":
            self._metrics.aborted.labels(self._model).inc()
        log.info(
            "request",
            extra={
                "request_id": self._request_id,
                "model": self._model,
                "end": self._end,
                "finish_reasons": self._reasons,
                "prompt_tokens": self._prompt_tokens,
                "generated_tokens": self._generated_tokens,
                "ttft": None if self._first is None else round(self._first - self._start, 4),
                "seconds": round(seconds, 4),
            },
        )


_GAUGES = {
    "num_requests_running": ("running", "sequences that a step computes"),
    "num_requests_waiting": ("waiting", "sequences that wait for their first step, or again after a preemption"),
    "outstanding_tokens": ("outstanding_tokens", "the router's estimate of the tokens that are still to come"),
    "compiled_after_warm_up": ("compiled_after_warm_up", "programs compiled after the warm-up; 0 is right"),
}
_COUNTERS = {
    "num_preemptions": ("preemptions", "times a sequence gave up its blocks"),
    "steps": ("steps", "steps run"),
    "step_tokens": ("tokens", "tokens that steps computed"),
    "step_padding_tokens": ("padding", "tokens that steps were padded by to their buckets"),
    "prefix_cache_queries": ("prompt_tokens", "prompt tokens that began to run"),
    "prefix_cache_hits": ("cached_tokens", "of those, found in the prefix cache"),
}


class _Replicas:
    """Turns what replicas say into metrics when they are asked for."""

    def __init__(self, replicas: Callable[[], Iterable[pb.ReplicaStats]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "replica")
        known = [(stats, (stats.model, stats.address)) for stats in self._replicas()]
        up = GaugeMetricFamily("fastgen:replica_up", "1 if the replica takes requests", labels=labels)
        use = GaugeMetricFamily("fastgen:kv_cache_usage_perc", "share of the KV blocks in use, 0 to 1", labels=labels)
        fill = GaugeMetricFamily("fastgen:batch_fill", "real tokens of all steps over their buckets'", labels=labels)
        padding = GaugeMetricFamily("fastgen:padding_share", "the rest of the buckets, padding", labels=labels)
        for stats, values in known:
            up.add_metric(values, stats.state == "ready")
            use.add_metric(values, 1 - stats.free_blocks / stats.blocks if stats.blocks else 0)
            buckets = stats.tokens + stats.padding
            fill.add_metric(values, stats.tokens / buckets if buckets else 0)
            padding.add_metric(values, stats.padding / buckets if buckets else 0)
        yield from (up, use, fill, padding)
        for name, (field, about) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"fastgen:{name}", about, labels=labels)
            for stats, values in known:
                gauge.add_metric(values, getattr(stats, field))
            yield gauge
        for name, (field, about) in _COUNTERS.items():
            counter = CounterMetricFamily(f"fastgen:{name}", about, labels=labels)
            for stats, values in known:
                counter.add_metric(values, getattr(stats, field))
            yield counter
        times = HistogramMetricFamily("fastgen:step_seconds", "time of steps, by bucket", labels=(*labels, "bucket"))
        for stats, values in known:
            for bucket in stats.bucket_times:
                every = [("+Inf", bucket.steps)]
                times.add_metric((*values, str(bucket.tokens)), buckets=every, sum_value=bucket.seconds)
        yield times
