"""A prediction of the first epoch of resident images, in which threads of the CPU decode all of them."""

from image_classification.config import ImageDataConfig

DECODING_MS = (1.8, 2.9)  # of a core, decoding and squashing an image of that size: assumptions, a range
HEIGHT, WIDTH = 375, 500  # of a usual image of ImageNet
CORES = (64, 128, 192)


def predict_decoding_s(data: ImageDataConfig, num_cores: int, num_ranks: int) -> tuple[float, float]:
    """Predict the seconds, least and most, in which threads decode all training images once.

    They are `data.num_workers` of each rank, and no more than the cores. Images that were encoded again take
    at best the share of their pixels. The lock of the interpreter, disks and a network may take longer.
    """
    shrinkage = min(1.0, data.encoded_px / HEIGHT) if data.encoded_px else 1.0
    images = data.num_train_samples * shrinkage**2 / min(num_cores, num_ranks * data.num_workers)
    low, high = (images * ms / 1e3 for ms in DECODING_MS)
    return low, high


def describe_first_epoch(data: ImageDataConfig, num_ranks: int) -> str:
    """Describe the prediction, with its constants, for machines of 64, 128 and 192 cores."""
    seconds = [predict_decoding_s(data, num_cores, num_ranks) for num_cores in CORES]
    times = [
        f"{low:.0f} to {high:.0f} s on {count} cores"
        for count, (low, high) in zip(CORES, seconds, strict=True)
    ]
    encoded = f", encoded again at {data.encoded_px} px, at best" if data.encoded_px else ""
    low, high = DECODING_MS
    return (
        f"first epoch, predicted and not measured: threads decode {data.num_train_samples:,} images{encoded} "
        f"in {', '.join(times)}, of which the steps of that epoch hide as many seconds as they take; "
        f"assuming {low} to {high} ms of a core for {WIDTH} x {HEIGHT} pixels, {data.num_workers} threads on "
        f"each of {num_ranks} rank(s); no GPU decodes"
    )
