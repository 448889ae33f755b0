"""slimerl: reinforcement learning of large language models; megatron-core trains, SGLang generates."""

__version__ = "0.1.0"
