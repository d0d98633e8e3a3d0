from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics


def recorded(run_dir: RunDir, key: str, split: str) -> list[tuple[int, float]]:
    """Step and value of each record, as ``metrics.jsonl`` has them."""
    return [(item["step"], item[key]) for item in read_metrics(run_dir, split)]
