"""Has to run before anything imports torch: forked ranks need a parent that never used threads."""

import os
import socket

# After OpenMP has started its threads in the parent, a forked rank hangs in its first big matmul.
os.environ["OMP_NUM_THREADS"] = "1"
# gloo looks the host's name up, which fails on a laptop without a network; loopback needs no name.
_loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
os.environ.setdefault("GLOO_SOCKET_IFNAME", (_loopback or ["lo"])[0])
# torch.cuda.is_available() in the parent must not start CUDA: forked ranks could not use it then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import hypothesis  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # the first optimizer imports it: once here, not per rank

torch.set_num_threads(1)

# Ranks take a while to fork, so no deadline; the same examples every run, so that a failure is
# the change's own and not the dice's.
hypothesis.settings.register_profile("ranks", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ranks")
