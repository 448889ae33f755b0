"""The run specification: one frozen, strict tree of values that every role reads.

Flows in: a YAML file and `key=value` overrides (see `load.py`). Flows out: a `RunSpec`.
Invariant: every key is used by some role, no value is changed after loading, units stand in the names.
A default lives here and nowhere else.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from slimerl.spec.agent import AgentSpec, SingleTurnAgent, check_agent
from slimerl.spec.algorithm import AlgorithmSpec
from slimerl.spec.critic import CriticSpec, check_critic
from slimerl.spec.elastic import check_elastic
from slimerl.spec.engine import EngineSpec
from slimerl.spec.evaluation import EvaluationSpec, check_evaluation
from slimerl.spec.evaluation_engines import check_evaluation_engines
from slimerl.spec.fields import (
    FilePath,
    NonNegative,
    Positive,
    Real,
    Seed,
    Strict,
    Workers,
)
from slimerl.spec.optimizer import OptimizerSpec
from slimerl.spec.oversample import check_oversample
from slimerl.spec.processes import check_processes
from slimerl.spec.reward import MathReward, RewardSpec
from slimerl.spec.routing import check_routing_replay
from slimerl.spec.speculation import SpeculationSpec, check_speculation
from slimerl.spec.survival import CheckpointSpec, DeadlineSpec, ResilienceSpec, check_checkpoints


def _no_directory_itself(name: str) -> str:
    if name in (".", ".."):
        raise ValueError("a run's name is that of its directory, and '.' and '..' are others; choose another")
    return name


Port = Annotated[int, Field(ge=0, le=65535)]


class ModelSpec(Strict):
    """The policy, as a Hugging Face checkpoint directory; its `config.json` gives the model arguments."""

    path: FilePath
    megatron_path: FilePath | None = None
    """Take the trainer's weights from this distributed checkpoint of the same model, which any layout reads:
    converted (tools/convert_checkpoint.py), or another run's checkpoints/step-N."""
    dtype: Literal["fp32", "bf16"] = "fp32"


class DataSpec(Strict):
    """Prompts as JSONL. One row: `{"id", "prompt", "answer"}`, for SFT `{"id", "prompt", "response"}`, for reward_model
    and dpo `{"id", "prompt", "chosen", "rejected"}`, and for reward_model, where it is wanted, `"margin"`."""

    train_path: FilePath
    eval_path: FilePath | None = None
    chat_template: bool = False
    """Wrap the prompt as one user turn with the tokenizer's chat template."""
    system_prompt: str | None = None
    max_prompt_tokens: Positive = 1024
    """A longer prompt is refused before the run starts."""

    @model_validator(mode="after")
    def _system_prompt_needs_template(self) -> "DataSpec":
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("data.system_prompt needs data.chat_template: true")
        return self


class ParallelSpec(Strict):
    """Sizes of the trainer's process grid; ranks = tensor * context * pipeline * data."""

    tensor: Positive = 1
    pipeline: Positive = 1
    virtual: Positive = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    pipeline_layout: str | None = None
    """Uneven stages in Megatron's notation, e.g. `Ettt|ttL`: E embedding, t layer, m multi-token prediction, L loss."""
    context: Positive = 1
    data: Positive = 1
    expert: Positive = 1
    """Ranks over which the experts are spread; takes its ranks from tensor * context * data."""
    expert_tensor: Positive | None = None
    """Tensor parallelism inside an expert; default: `tensor`."""
    sequence_parallel: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> "ParallelSpec":
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("training.parallel.sequence_parallel needs training.parallel.tensor > 1")
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError("training.parallel.virtual needs training.parallel.pipeline > 1")
        if self.pipeline_layout is not None and self.pipeline == 1:
            raise ValueError("training.parallel.pipeline_layout needs training.parallel.pipeline > 1")
        if self.expert_tensor_size > 1 and self.expert == 1 and not self.sequence_parallel and self.expert_tensor:
            # Megatron's expert layers would add up their parts twice
            raise ValueError(
                "training.parallel.expert_tensor > 1 needs training.parallel.expert > 1 or sequence_parallel: true"
            )
        in_stage = self.world_size // self.pipeline
        if in_stage % (self.expert * self.expert_tensor_size):
            raise ValueError(
                f"training.parallel: expert * expert_tensor = {self.expert} * {self.expert_tensor_size} must divide "
                f"the ranks of a pipeline stage, tensor * context * data = {in_stage}"
            )
        return self

    @property
    def expert_tensor_size(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data


class TrainingSpec(Strict):
    steps: Positive
    prompts_per_step: Positive
    """Prompts (groups) whose samples make one step; where they come from data, rows per step."""
    minibatches_per_step: Positive = 1
    """Optimizer updates per step; above 1 the proximal log-probabilities take a pass of their own."""
    micro_batch_tokens: Positive = 4096
    """Upper bound of the tokens that one rank computes at once (a longer sample stands alone)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, core attention, or whole layers."""
    shared_prefix: Literal["auto", "always", "never"] = "auto"
    """Compute a prompt once for the samples of its group. auto: where Transformer Engine's attention, which cannot, is
    not used; always: with FlexAttention in its place."""
    parallel: ParallelSpec = ParallelSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    critic: CriticSpec | None = None
    """Of ppo; default: what `CriticSpec` says."""
    threads_per_rank: Workers = 1
    export_path: FilePath | None = None
    """Where the trained model is written as a Hugging Face checkpoint; default: OUTPUT_DIR/model."""


class RolloutSpec(Strict):
    samples_per_prompt: Positive = 8
    max_new_tokens: Positive = 256
    temperature: Annotated[Real, Field(ge=1e-6)] = 1.0
    """Of the distribution that is sampled and trained. Below 1e-6 SGLang takes the likeliest token instead."""
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    max_staleness: NonNegative = 0
    """Policy versions that a sample may be behind: 0 synchronous, 1 one-step-off, more asynchronous."""
    oversample: Annotated[Real, Field(ge=1)] | None = None
    """Steps' worth of prompts under way at once; a step takes the first that are complete, the others go on as partial
    samples under the next weights. Default: as many as `max_staleness` allows, max_staleness + 1."""
    on_update: Literal["retract", "in_place", "abort", "drain"] = "retract"
    """What requests do that still run when new weights come. retract: give their KV cache back and go on from their
    tokens under the new weights. in_place: keep it, computed by the old weights. abort: end, and be sent again with
    their tokens. drain: the weights wait until they have ended."""
    chunk_tokens: Positive | None = None
    """Divided rollout: an engine generates so many tokens of a sample at most before it is sent anew, to whichever
    engine has room; checkpoints keep what is there. Each move costs the prompt's computation: 256 or more."""
    router: Literal["kv_aware", "least_loaded"] = "kv_aware"
    """Which engine a request goes to. kv_aware: by what each has cached of its prompt, under the same weights, and by
    what each has to do; siblings go where their prompt is. least_loaded: the one with the fewest requests."""
    max_running_requests: Positive = 256
    """Requests in flight per engine."""
    max_buffered_gib: Annotated[Real, Field(gt=0)] = 16.0
    """Of samples that wait for the trainer, those under way counted at their longest: beyond it no prompt is begun but
    those of the next step."""
    speculation: SpeculationSpec = SpeculationSpec()
    processes: Positive = 1
    """Rollout processes. Each has its share of the engines, makes its share of the samples and holds them until they
    are trained; the first keeps the books of all."""
    port: Port = 0
    """Port of the control service; 0 takes a free one."""

    @property
    def smallest_group(self) -> int:
        """Samples that must be left of a prompt's, where some are lost, for it to be trained on."""
        return min(2, self.samples_per_prompt)

    @model_validator(mode="after")
    def _partial_samples_may_be_stale(self) -> "RolloutSpec":
        check_oversample(self.oversample, self.max_staleness, self.on_update, self.chunk_tokens)
        return self

    @model_validator(mode="after")
    def _nucleus_not_replayed(self) -> "RolloutSpec":
        if self.top_p != 1.0:
            raise ValueError(
                "rollout.top_p must be 1.0: a smaller value renormalises the behaviour probabilities on the "
                "engine's side only, and the policy ratio would be silently biased"
            )
        return self


class ClusterSpec(Strict):
    """The GPUs of the run; without CUDA it means nothing, but for `turns`."""

    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: engines and trainer take turns on the same GPUs, and hand their memory to each other.
    disaggregated: the GPUs behind the trainer's are the engines'."""
    turns: Literal["auto", "always"] = "auto"
    """When colocated roles take turns. auto: with CUDA; always: also without, where the trainer's memory moves about in
    the host's and engines free none, to try the order of the turns."""
    gpus_per_node: Positive = 8
    network: Literal["loopback", "hostname"] = "loopback"
    """Where roles listen. loopback: all of them are on one machine. hostname: at the address of the machine's name,
    where roles on other machines reach them; it must be a private network."""
    gpu_memory_gib: Annotated[Real, Field(gt=0, le=1e6)] = 80.0
    """Of one GPU, for `slimerl check --plan-only`; elsewhere the machine is asked."""

    @model_validator(mode="after")
    def _turns_need_one_place(self) -> "ClusterSpec":
        if self.turns == "always" and self.placement != "colocated":
            raise ValueError("cluster.turns: always needs cluster.placement: colocated; set that, or drop the key")
        return self


class SyncSpec(Strict):
    """How new weights get into the engines."""

    transport: Literal["ipc", "broadcast", "disk", "delta", "shards"] = "ipc"
    """`ipc`: shared memory; engines on the trainer's machine. `broadcast`: a process group of trainer and engines;
    anywhere on one network. `disk`: files in `output_dir`, which trainer and engines must share. `delta`: only the
    elements that changed, over slow links; the trainer keeps what it sent last, as large as the engines' weights, in
    host memory. `shards`: each trainer rank sends its own part."""
    bucket_mib: Positive = 64
    """Weights travel in pieces of this size; two of them are under way at a time."""
    staged: bool = True
    """Of `shards`, in which every trainer rank sends its own part to the engine GPUs that want it. true: into a buffer
    as large as the engine's weights, while engines generate; they stop for a copy alone, and a sync that fails leaves
    them as they were. false: no buffer, and engines stop for the whole transfer."""


class RunSpec(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$"), AfterValidator(_no_directory_itself)]
    output_dir: FilePath | None = None
    """Default: runs/NAME."""
    seed: Seed = 1234
    model: ModelSpec
    data: DataSpec
    algorithm: AlgorithmSpec = AlgorithmSpec()
    training: TrainingSpec
    rollout: RolloutSpec = RolloutSpec()
    engine: EngineSpec = EngineSpec()
    cluster: ClusterSpec = ClusterSpec()
    agent: AgentSpec = SingleTurnAgent()
    reward: RewardSpec = MathReward()
    sync: SyncSpec = SyncSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    resilience: ResilienceSpec = ResilienceSpec()
    deadlines: DeadlineSpec = DeadlineSpec()

    @property
    def run_dir(self) -> Path:
        return self.output_dir if self.output_dir is not None else Path("runs") / self.name

    @property
    def export_dir(self) -> Path:
        return self.training.export_path if self.training.export_path is not None else self.run_dir / "model"

    @property
    def input_paths(self) -> dict[str, Path]:
        """What the run reads, by key."""
        paths = {
            "model.path": self.model.path,
            "model.megatron_path": self.model.megatron_path,
            "engine.model_path": self.engine.model_path,
            "algorithm.teacher_path": self.algorithm.teacher_path,
            "data.train_path": self.data.train_path,
            "data.eval_path": self.data.eval_path,
            "training.critic.path": None if self.training.critic is None else self.training.critic.path,
        }
        sets = {f"evaluation.sets.{number}.path": one.path for number, one in enumerate(self.evaluation.sets)}
        return {key: path for key, path in paths.items() if path is not None} | sets

    @property
    def evaluates(self) -> bool:
        return self.data.eval_path is not None or bool(self.evaluation.sets)

    @property
    def critic_path(self) -> Path | None:
        """Where the critic's weights come from; None: there is none."""
        if not self.algorithm.has_critic:
            return None
        return (self.training.critic and self.training.critic.path) or self.model.path

    @property
    def critic_optimizer(self) -> OptimizerSpec:
        return (self.training.critic and self.training.critic.optimizer) or self.training.optimizer

    @property
    def uses_engines(self) -> bool:
        """Some algorithms read their responses from the data; all others sample them."""
        return self.algorithm.samples_responses

    @property
    def engine_gpus(self) -> int:
        """Of all engines that may run at once."""
        return self.engine.most_replicas * self.engine.tensor_parallel if self.uses_engines else 0

    @property
    def gpus(self) -> int:
        """Of the whole run."""
        trainer = self.training.parallel.world_size
        return max(trainer, self.engine_gpus) if self.is_colocated else trainer + self.engine_gpus

    @property
    def trainer_nodes(self) -> int:
        """With the engines that share their GPUs."""
        return -(-self.training.parallel.world_size // self.cluster.gpus_per_node)

    @property
    def engine_nodes(self) -> int:
        """Beside the trainer's; disaggregated alone."""
        return 0 if self.is_colocated else -(-self.engine_gpus // self.cluster.gpus_per_node)

    @property
    def nodes_per_engine(self) -> int:
        return -(-self.engine.tensor_parallel // self.cluster.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Of the trainer."""
        return min(self.training.parallel.world_size, self.cluster.gpus_per_node)

    @property
    def is_colocated(self) -> bool:
        return self.cluster.placement == "colocated"

    @property
    def shares_gpus(self) -> bool:
        """Where there are GPUs, trainer and engines take turns in their memory."""
        return self.is_colocated and self.uses_engines

    def takes_turns(self, cuda: bool) -> bool:
        """Trainer and engines take turns on this machine."""
        return self.shares_gpus and (cuda or self.cluster.turns == "always")

    def first_gpu(self, engine: int) -> int:
        """Of an engine, on its node: engine after engine, from the first GPU on or from behind the trainer's."""
        before = 0 if self.is_colocated else self.training.parallel.world_size
        return (before + engine * self.engine.tensor_parallel) % self.cluster.gpus_per_node

    @model_validator(mode="after")
    def _fits_together(self) -> "RunSpec":
        training, rollout = self.training, self.rollout
        samples = training.prompts_per_step * (rollout.samples_per_prompt if self.uses_engines else 1)
        parts = training.minibatches_per_step * training.parallel.data
        if samples < parts:
            raise ValueError(
                f"a step has {samples} samples, but training.minibatches_per_step * training.parallel.data = "
                f"{parts} parts want at least one each; raise training.prompts_per_step"
            )
        least = training.prompts_per_step * rollout.smallest_group
        if self.uses_engines and least < training.minibatches_per_step:
            raise ValueError(
                f"a step of which samples are lost may have {least} left, {rollout.smallest_group} of each prompt: too "
                f"few for training.minibatches_per_step = {training.minibatches_per_step}; raise "
                "training.prompts_per_step"
            )
        check_critic(self.training.critic, self.algorithm, training.steps, self.model.megatron_path)
        check_agent(self.agent, self.uses_engines, self.data.chat_template)
        if self.algorithm.compares_groups and rollout.samples_per_prompt < 2:
            raise ValueError(
                f"{self.algorithm.name} compares the samples of a prompt: rollout.samples_per_prompt must be at least 2"
            )
        if (self.algorithm.overlong_limit_tokens or 0) > rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_limit_tokens = {self.algorithm.overlong_limit_tokens} is never reached: "
                f"rollout.max_new_tokens = {rollout.max_new_tokens}"
            )
        check_speculation(rollout.speculation, rollout.temperature, self.algorithm, self.engine.drafting)
        check_routing_replay(self)
        check_elastic(self)
        check_processes(self)
        check_checkpoints(self)
        check_evaluation(self.evaluation, self.reward, self.uses_engines, self.shares_gpus, self.evaluates)
        check_evaluation_engines(self)
        longest = self.data.max_prompt_tokens + self.evaluation.longest_new_tokens(rollout.max_new_tokens)
        if self.uses_engines and longest > self.engine.context_tokens:
            raise ValueError(
                f"data.max_prompt_tokens + max_new_tokens (of rollout or evaluation) = {longest} exceeds "
                f"engine.context_tokens = {self.engine.context_tokens}"
            )
        return self
