"""Moving keys and values between slots."""

from pallas_kernels.move_kv.api import move_kv as move_kv
