"""What accelerators hold and do, per chip, as their makers publish it.

Peak figures: a real step reaches a part of them. Whatever is computed from these is called
roofline, never measured. `source` names the maker's page, of GPUs as other pages cite it; where
pages of one maker differ, the smaller capacity is taken, and the difference is said.
"""

import dataclasses

_CLOUD_TPU = "Google Cloud documentation, https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_GIB = 2**30
GOOGLE, NVIDIA = "Google", "NVIDIA"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """One chip."""

    vendor: str  # GOOGLE makes TPUs, NVIDIA GPUs
    memory_bytes: int
    bytes_per_s: float  # of its memory
    flops_per_s: float  # bfloat16 products with sums in float32, dense; else those of float16
    source: str
    has_bfloat16: bool = True  # otherwise bfloat16 is computed in float32
    # Devices that a program sees of one chip; memory and speed are shared evenly.
    devices_per_chip: int = 1

    @property
    def ridge(self) -> float:
        """Operations per byte at which memory and arithmetic take equally long."""
        return self.flops_per_s / self.bytes_per_s

    def per_device(self) -> "DeviceFigures":
        """Returns the share of one device that a program sees."""
        parts = self.devices_per_chip
        return dataclasses.replace(
            self,
            memory_bytes=self.memory_bytes // parts,
            bytes_per_s=self.bytes_per_s / parts,
            flops_per_s=self.flops_per_s / parts,
            devices_per_chip=1,
        )


DEVICES = {
    "v4": DeviceFigures(
        vendor=GOOGLE,
        memory_bytes=32 * _GIB,
        bytes_per_s=1200e9,
        flops_per_s=275e12,
        source='"TPU v4", ' + _CLOUD_TPU + "v4",
    ),
    "v5e": DeviceFigures(
        vendor=GOOGLE,
        memory_bytes=16 * 10**9,
        bytes_per_s=819e9,
        flops_per_s=197e12,
        source='"TPU v5e", ' + _CLOUD_TPU + "v5e",
    ),
    "v5p": DeviceFigures(
        vendor=GOOGLE,
        # "95 GB" on its own page; 95 GiB where "TPU7x (Ironwood)" compares the generations.
        memory_bytes=95 * 10**9,
        bytes_per_s=2765e9,
        flops_per_s=459e12,
        source='"TPU v5p", ' + _CLOUD_TPU + "v5p",
    ),
    "v6e": DeviceFigures(
        vendor=GOOGLE,
        # "32 GB" on its own page; 32 GiB where "TPU7x (Ironwood)" compares the generations.
        memory_bytes=32 * 10**9,
        bytes_per_s=1640e9,  # some versions of the page round to 1600 GBps
        flops_per_s=918e12,
        source='"TPU v6e", ' + _CLOUD_TPU + "v6e",
    ),
    "tpu7x": DeviceFigures(
        vendor=GOOGLE,
        memory_bytes=192 * _GIB,
        bytes_per_s=7380e9,
        flops_per_s=2307e12,
        source='"TPU7x (Ironwood)", ' + _CLOUD_TPU + "tpu7x",
        devices_per_chip=2,
    ),
    "t4": DeviceFigures(
        vendor=NVIDIA,
        memory_bytes=16 * 10**9,
        bytes_per_s=320e9,
        flops_per_s=65e12,
        source='"NVIDIA T4", ' + _NVIDIA + "tesla-t4",
        has_bfloat16=False,
    ),
    "l4": DeviceFigures(
        vendor=NVIDIA,
        memory_bytes=24 * 10**9,
        bytes_per_s=300e9,
        flops_per_s=121e12,  # half of the figure with sparsity
        source='"NVIDIA L4 Tensor Core GPU", ' + _NVIDIA + "l4",
    ),
    "a100-40gb": DeviceFigures(  # SXM
        vendor=NVIDIA,
        memory_bytes=40 * 10**9,
        bytes_per_s=1555e9,
        flops_per_s=312e12,
        source='"NVIDIA A100 Tensor Core GPU", datasheet, ' + _NVIDIA + "a100",
    ),
    "a100": DeviceFigures(  # 80 GB, SXM
        vendor=NVIDIA,
        memory_bytes=80 * 10**9,
        bytes_per_s=2039e9,
        flops_per_s=312e12,
        source='"NVIDIA A100 Tensor Core GPU", datasheet, ' + _NVIDIA + "a100",
    ),
    "h100": DeviceFigures(  # SXM
        vendor=NVIDIA,
        memory_bytes=80 * 10**9,
        bytes_per_s=3350e9,
        flops_per_s=989.4e12,
        source='"NVIDIA H100 Tensor Core GPU", ' + _NVIDIA + "h100",
    ),
    "h200": DeviceFigures(  # SXM
        vendor=NVIDIA,
        memory_bytes=141 * 10**9,
        bytes_per_s=4800e9,
        flops_per_s=989.4e12,
        source='"NVIDIA H200 Tensor Core GPU", ' + _NVIDIA + "h200",
    ),
    "b200": DeviceFigures(  # of an HGX B200
        vendor=NVIDIA,
        memory_bytes=180 * 10**9,
        bytes_per_s=8000e9,
        flops_per_s=2250e12,  # half of the figure with sparsity
        source='"NVIDIA HGX Platform", ' + _NVIDIA + "hgx",
    ),
}

# By what jax calls a device, or the beginning of it.
_KINDS: dict[str, str | None] = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "tpu7x",
    "Tesla T4": "t4",
    "NVIDIA T4": "t4",
    "NVIDIA L40": None,
    "NVIDIA L4": "l4",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def of_kind(device_kind: str) -> DeviceFigures | None:
    """Returns the figures of a device by its `device_kind`, or None if they are not known."""
    for kind, name in _KINDS.items():
        if device_kind.startswith(kind):
            return None if name is None else DEVICES[name]
    return None
