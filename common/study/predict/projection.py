"""The minutes to the target on the devices of a published system, from a bench of one of them."""

from typing import Any

from common.measure.device_run import NUM_DEVICES
from common.repository import build_probes
from common.study.predict.minutes import estimate_run
from common.study.predict.sources import batch_of, published_samples, rates_of_bench
from common.training.load import load_open


def project(name: str, figures: dict[str, Any]) -> dict[str, Any] | None:
    """Return the minutes of a configuration's full name, their interval, and what they assume.

    `figures` are those of `ttt bench`. None where they lack the rate of a shape or are of another batch than
    a device's share, and where no published run tells how many samples the target takes: at size mini, and
    with another model, target, batch, optimizer or length.
    """
    config = load_open(figures["benchmark"], name, size=figures["size"], settings=[]).config
    samples = published_samples(config)
    is_share = batch_of(figures, name) == config.global_batch_size // NUM_DEVICES
    if samples is None or not is_share:
        return None
    probes = build_probes(config)
    rates = rates_of_bench(figures, name, probes.shape_shares(), "", probes.rate)
    if rates is None:
        return None
    estimated = estimate_run(
        config, probes.phases(), rates=rates, samples=samples, slower=1 / NUM_DEVICES, devices=NUM_DEVICES
    )
    return {key: estimated[key] for key in ("minutes", "low", "high")} | {
        "assuming": f"if the target takes the {samples.typical:,.0f} samples of {samples.source}, the loader "
        f"keeps up, devices scale perfectly and a sample of the {estimated['num_evaluations']} evaluations "
        "takes a third of a trained one"
    }
