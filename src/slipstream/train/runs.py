"""A training run of any method: load, train, evaluate, write."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from slipstream.assets import EMBEDDED_TARGET
from slipstream.assets.workload.reading import Question, read_workload
from slipstream.errors import ConfigError
from slipstream.models import load_tokenizer
from slipstream.train.allocator import keep_freed_memory
from slipstream.train.batches import TrainingDocument, read_documents
from slipstream.train.evaluation import Evaluator
from slipstream.train.features import FeatureCache
from slipstream.train.options import EvaluationOptions, TrainOptions
from slipstream.train.overlap import Overlap, find_overlap
from slipstream.train.processes import Processes
from slipstream.train.progress import too_few_tokens
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Progress, Student, Trainer


@dataclass(frozen=True)
class TrainingRun:
    """Settings of a training run, common to all methods."""

    model: str | None
    """The target; None is the embedded one."""
    data: Seq[Path]
    output: Path
    options: TrainOptions
    evaluation: EvaluationOptions
    device: str | None = None
    threads: int | None = None
    feature_folder: Path | None = None
    """Where `cache_features` keeps them; `output/features` by default."""


def run(
    plan: TrainingRun,
    make_student: Callable[[FrozenTarget, Any, Seq[TrainingDocument]], Student],
    method: str,
    method_options: Mapping[str, Any],
    say: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train the student that `make_student` makes from the target, its tokenizer and the documents.

    The engine evaluates it at the start and the end, and in between as the options say. Raises what loading and
    `Trainer.run` raise, and `RequestError` for invalid data.
    """
    options = plan.options
    keep_freed_memory()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    processes = Processes()
    device = _device(plan.device)
    path = plan.model or EMBEDDED_TARGET
    tokenizer = load_tokenizer(path)
    overlap = _overlap(plan, tokenizer)
    say(str(overlap))
    drops = overlap.conversations if plan.evaluation.overlap == "drop_training" else frozenset()
    documents = _documents(plan, tokenizer, drops)
    target = FrozenTarget(path, device, getattr(torch, options.dtype))
    student = make_student(target, tokenizer, documents)
    begins_anew = not method_options.get("init") and not method_options.get("keep_layers")
    _describe(student, documents, options.max_tokens if begins_anew else None, say)
    features = None
    if options.cache_features:
        if processes.count > 1:
            raise ConfigError("--cache-features is for one process")
        features = _cache(plan, target, student, [d.tokens for d in documents])
        if not _fill(features, say, stop):
            return Progress()
    pad = tokenizer.pad_token_id
    trainer = Trainer(
        student,
        target,
        documents,
        int(tokenizer.eos_token_id if pad is None else pad),
        options,
        plan.output,
        {"method": method, "method_options": dict(method_options), **_made_with(plan, overlap)},
        _evaluator(plan, overlap).evaluate,
        say,
        lambda progress: stop(),
        processes,
        features,
    )
    return trainer.run()


def _made_with(plan: TrainingRun, overlap: Overlap) -> dict[str, Any]:
    """What a run depends on in addition to its method: it can be continued only with the same."""
    return {
        "target": plan.model or "embedded pair",
        "data": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in plan.data},
        "evaluation": asdict(plan.evaluation),
        "overlap": overlap.as_json(),
    }


def _evaluator(plan: TrainingRun, overlap: Overlap) -> Evaluator:
    """What measures the student in the engine, without the prompts that are left out."""
    measured = plan.evaluation
    return Evaluator(
        plan.model,
        measured.eval_workload,
        measured.eval_prompts_per_task,
        measured.eval_max_tokens,
        excluded=overlap.prompts if measured.overlap == "drop_evaluation" else frozenset(),
    )


def _documents(plan: TrainingRun, tokenizer: Any, drops: AbstractSet[str]) -> Seq[TrainingDocument]:
    """The data without the conversations `drops`; raises `ConfigError` where they do not fill a batch."""
    documents = read_documents(plan.data, tokenizer, plan.options.row_length, drops)
    if len(documents) < plan.options.batch_rows:
        raise ConfigError(
            f"the data have {len(documents)} conversations, too few for a batch of {plan.options.batch_rows} rows; "
            "lower --batch-rows"
        )
    return documents


def _describe(
    student: Student, documents: Seq[TrainingDocument], max_tokens: int | None, say: Callable[[str], None]
) -> None:
    """Say how much there is to learn from and what learns; warn where `max_tokens` of it are too few."""
    num_tokens = sum(len(document.tokens) for document in documents)
    num_answer = sum(int(document.is_answer.sum()) for document in documents)
    learning = sum(weight.numel() for weight in student.module.parameters() if weight.requires_grad)
    say(
        f"{len(documents):,} documents, {num_tokens:,} tokens, {num_answer:,} of them answers; "
        f"{learning:,} trainable weights"
    )
    if max_tokens is not None and (warning := too_few_tokens(num_answer, num_tokens, max_tokens, learning)):
        say(warning)
    say(student.about_loss())


def _overlap(plan: TrainingRun, tokenizer: Any) -> Overlap:
    """Evaluation prompts in the training data; raises `ConfigError` where the options refuse them."""
    measured = plan.evaluation
    questions = read_workload(measured.eval_workload).questions
    if measured.overlap != "drop_evaluation":
        questions = first_a_task(questions, measured.eval_prompts_per_task)
    overlap = find_overlap(questions, plan.data, tokenizer)
    if overlap and measured.overlap == "refuse":
        raise ConfigError(
            f"{overlap}, so that evaluations would measure memorisation; give another --eval-workload, or "
            "--overlap drop_training, drop_evaluation (use other prompts of the workload) or report"
        )
    return overlap


def first_a_task(questions: Seq[Question], per_task: int) -> list[Question]:
    """The first `per_task` questions of each task."""
    number: Counter[str] = Counter()
    chosen = []
    for question in questions:
        number[question.task] += 1
        if number[question.task] <= per_task:
            chosen.append(question)
    return chosen


def _device(name: str | None) -> torch.device:
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _cache(plan: TrainingRun, target: FrozenTarget, student: Student, documents: Seq[Any]) -> FeatureCache:
    folder = plan.feature_folder or plan.output / "features"
    return FeatureCache(folder, target, documents, student.feature_layers, plan.options.feature_cache_bytes)


def _fill(features: FeatureCache, say: Callable[[str], None], stop: Callable[[], bool]) -> bool:
    """Compute the features that are not there yet; False where `stop` ended it."""
    said = 0

    def report(done: int, total: int) -> None:
        nonlocal said
        if done * 10 // total > said:
            said = done * 10 // total
            say(f"features of {done:,} of {total:,} documents computed")

    return features.fill(report, stop)
