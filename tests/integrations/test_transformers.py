"""KSD in the loop of Hugging Face's Trainer, and with Accelerate: steps, masks, exact resume, callbacks, refusals."""

from __future__ import annotations

import doctest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow, StepReport, Subsets

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from krylov_descent.integrations.transformers import KSDTrainer, prepare

transformers: Any = pytest.importorskip("transformers")  # its models are not typed

WORDS = 11
IGNORED = -100
NAMES = transformers.TrainingArguments.__dataclass_fields__
RECOMPUTED = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in NAMES)
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 10,
}


def gpt2() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": WORDS, "n_positions": 10, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SHAPE, attn_implementation="eager"))


def counting(samples: int = 160, seed: int = 1) -> list[dict[str, list[int]]]:
    """Sequences of 3 to 9 words: a start, a stride, and what follows from them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start, stride, length in torch.randint(0, 1000, (samples, 3), generator=generator).tolist():
        ids = [(start + (1 + stride % 2) * i) % WORDS for i in range(3 + length % 7)]
        found.append({"input_ids": ids})
    return found


def parity(samples: int = 160) -> list[dict[str, Any]]:
    return [{**sample, "labels": int(sample["input_ids"][1] > 5)} for sample in counting(samples)]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [IGNORED] * (longest - len(sample["input_ids"])) for sample in samples])
    batch = {"input_ids": ids.clamp(min=0), "attention_mask": ids.ne(IGNORED).long()}
    if "labels" in samples[0]:
        return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}
    return {**batch, "labels": ids}


def trainer(directory: Path, model: Any = None, *, arguments: Mapping[str, Any] = {}, **settings: Any) -> KSDTrainer:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "use_cpu": True}
    given = transformers.TrainingArguments(str(directory), **{"per_device_train_batch_size": 80, **quiet, **arguments})
    defaults = {"train_dataset": counting(), "data_collator": padded, "fraction": 0.2}
    ksd = (KSD, {"krylov_dim": 6})
    return KSDTrainer(
        gpt2() if model is None else model, given, **{**defaults, "optimizer_cls_and_kwargs": ksd, **settings}
    )


def parameters(model: Any) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def test_the_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    reports: list[StepReport] = []
    fitted = trainer(tmp_path, arguments={"max_steps": 3, "weight_decay": 1e-3}, on_report=reports.append)
    output = fitted.train()

    model = gpt2().eval()  # with dropout and tied weights
    names = fitted.get_decay_parameter_names(model)
    decayed = [p for n, p in model.named_parameters() if n in names]
    others = [p for n, p in model.named_parameters() if n not in names]
    optimizer = KSD([{"params": decayed, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}], krylov_dim=6)
    sets = Subsets(counting(), batch_size=80, fraction=0.2, seed=42, collate_fn=padded)

    def closure(batch: Any) -> Any:
        outputs = model(**batch)
        return outputs.loss, outputs.logits, batch["labels"][:, 1:].ne(IGNORED).sum()

    plain = [optimizer.step(closure, sets) for _ in range(3)]
    assert [r.loss for r in reports] == [r.loss for r in plain]
    assert output.metrics["settled_loss"] == optimizer.settle(closure, sets).loss
    assert same(parameters(fitted.model), parameters(model))
    assert fitted.state.global_step == 3
    assert fitted.state.epoch == 3


@pytest.mark.parametrize(
    ("model", "data", "factor"), [(gpt2, counting, 0.3), (llama, counting, 0.2), (bert, parity, 0.1)]
)
def test_models_learn(tmp_path: Path, model: Any, data: Any, factor: float) -> None:
    reports: list[StepReport] = []
    made = trainer(tmp_path, model(), arguments={"max_steps": 6}, train_dataset=data(), on_report=reports.append)
    assert made.train().metrics["settled_loss"] < factor * reports[0].loss


def test_the_flow_in_place_of_ksd(tmp_path: Path) -> None:
    """It draws rows of the cross-entropy's curvature, sample by sample."""
    reports: list[StepReport] = []
    flow = {"optimizer_cls_and_kwargs": (GaussNewtonFlow, {"rows": 50}), "train_dataset": parity()}
    made = trainer(tmp_path, bert(), arguments={"max_steps": 4}, on_report=reports.append, **flow)
    assert made.train().metrics["settled_loss"] < 0.9 * reports[0].loss
    assert {report.krylov_dim for report in reports} == {0}
    assert made._ksd.state_dict()["krylov_descent"]["optimizer"] == "GaussNewtonFlow"


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    kept = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    whole: list[StepReport] = []
    first = trainer(tmp_path / "a", arguments=kept, on_report=whole.append)
    first.train()

    again: list[StepReport] = []
    second = trainer(tmp_path / "b", arguments={**kept, "seed": 42}, on_report=again.append)
    second.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert [r.iteration for r in again] == [2, 3, 4]
    assert [r.loss for r in again] == [r.loss for r in whole[2:]]
    assert same(parameters(second.model), parameters(first.model))
    assert second.state.global_step == 5


def test_logs_evaluation_and_early_stopping(tmp_path: Path) -> None:
    noise = torch.Generator().manual_seed(0)
    samples = [{"input_ids": ids} for ids in torch.randint(0, WORDS, (60, 6), generator=noise).tolist()]
    made = trainer(
        tmp_path,
        arguments={
            "max_steps": 40,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
        },
        train_dataset=samples[:40],
        eval_dataset=samples[40:],
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
        full_batch=True,  # fits 40 samples of noise by heart
    )
    made.train()
    held_out = [row["eval_loss"] for row in made.state.log_history if "eval_loss" in row]
    assert 3 <= len(held_out) < 40
    assert held_out[-1] > min(held_out)
    assert made.evaluate()["eval_loss"] == pytest.approx(min(held_out), rel=1e-6)
    rows = [row for row in made.state.log_history if "search_loss" in row]
    assert len(rows) == made.state.global_step
    assert all("learning_rate" not in row and row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_label_smoothing_and_a_loss_of_ones_own(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    reports: list[StepReport] = []
    trainer(tmp_path, arguments={"max_steps": 1}, compute_loss_func=loss, on_report=reports.append).train()
    trainer(tmp_path, arguments={"max_steps": 1}, on_report=reports.append).train()
    smooth = {"max_steps": 1, "label_smoothing_factor": 0.1}
    trainer(tmp_path, arguments=smooth, on_report=reports.append).train()
    own, default, smoothed = reports
    assert own.loss == pytest.approx(default.loss, rel=1e-5)
    assert smoothed.search_loss_after < smoothed.search_loss_before


def test_weights_count_what_the_model_predicts(tmp_path: Path) -> None:
    labels = torch.tensor([[3, 4, IGNORED], [5, IGNORED, IGNORED]])
    for model, expected in ((gpt2(), 1), (llama(), 1), (bert(), 3), (t5(), 3)):
        weight = trainer(tmp_path, model).loss_weight({"labels": labels})
        assert weight is not None
        assert int(weight) == expected
    assert trainer(tmp_path).loss_weight({"start_positions": labels}) is None
    shifted = trainer(tmp_path).loss_weight({"labels": labels, "shift_labels": labels})
    assert shifted is not None
    assert int(shifted) == 3


def t5() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0))


class Masked:
    mlm = True

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return padded(samples)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps is 2.*micro-batches anyway"),
        ({"max_grad_norm": 0.5}, {}, r"max_grad_norm is 0\.5: KSD has no gradient to clip"),
        ({"bf16": True}, {}, "bf16 is True.*float32 model"),
        ({RECOMPUTED: True}, {}, f"{RECOMPUTED} is True: it is off in eval mode"),
        ({"neftune_noise_alpha": 5.0}, {}, "without noise"),
        ({"auto_find_batch_size": True}, {}, "set per_device_train_batch_size"),
        ({}, {"data_collator": Masked()}, "masks tokens at random.*Mask once"),
        ({}, {"optimizer_cls_and_kwargs": (torch.optim.Adam, {})}, r"optimizer_cls_and_kwargs=\(KSD"),
        ({}, {"optimizers": (KSD([nn.Parameter(torch.ones(1))]), None)}, r"optimizer_cls_and_kwargs=\(KSD"),
    ],
)
def test_refusals(tmp_path: Path, arguments: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    AcceleratorState._reset_state()  # it would refuse another precision by itself
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, arguments=arguments, **settings)
    AcceleratorState._reset_state()


def test_a_model_without_logits_is_refused(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WORDS))

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
            scores = self.w[input_ids].mean(1)
            return {"loss": scores.square().mean(), "scores": scores}

    with pytest.raises(ValueError, match=r"no logits, only loss, scores. Override KSDTrainer\.convex_outputs"):
        trainer(tmp_path, Bare(), arguments={"max_steps": 1}).train()


def test_accelerate_saves_and_loads_exactly(tmp_path: Path) -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    sets = Subsets((x, x.prod(1, keepdim=True)), batch_size=100, fraction=0.2, seed=0)

    def made() -> tuple[Accelerator, KSD, Any, nn.Module]:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimizer = prepare(accelerator, KSD(model.parameters(), krylov_dim=5))

        def closure(batch: Any) -> Any:
            residual = model(batch[0]) - batch[1]
            return residual.square().mean(), residual

        return accelerator, optimizer, closure, model

    accelerator, optimizer, closure, model = made()
    for _ in range(3):
        optimizer.step(closure, sets)
    accelerator.save_state(str(tmp_path / "state"))
    whole = [optimizer.step(closure, sets).loss for _ in range(3)]

    accelerator, optimizer, closure, resumed = made()
    accelerator.load_state(str(tmp_path / "state"))
    assert [optimizer.step(closure, sets).loss for _ in range(3)] == whole
    assert same(parameters(resumed), parameters(model))


def test_accelerate_with_mixed_precision_is_refused() -> None:
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="mixed_precision='bf16'"):
        prepare(Accelerator(cpu=True, mixed_precision="bf16"), KSD([nn.Parameter(torch.ones(1))]))
    AcceleratorState._reset_state()


def test_docstrings_run() -> None:
    from krylov_descent.integrations import transformers as integration

    assert doctest.testmod(integration, extraglobs={"torch": torch}).failed == 0
