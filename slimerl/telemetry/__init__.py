"""What a run shows of itself: metrics (TensorBoard, JSONL), phases, progress, and the final report."""

from slimerl.telemetry.run_log import RunLog, read_records

__all__ = ["RunLog", "read_records"]
