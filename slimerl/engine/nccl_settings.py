"""What both ends of an NCCL group that joins trainer and engines must agree on."""

NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0"}
"""SGLang's own choice in its processes. NCCL's default differs, and ranks that allocate their buffers in two ways can
fail to connect. A value that stands in the environment already wins on both ends."""
