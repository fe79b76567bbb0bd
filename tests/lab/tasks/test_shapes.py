"""What labels say of an output, the losses and metrics that follow, and the sentence where they do not fit."""

import pytest
import torch
import torch.nn.functional as F

from mixnorm_lab.config.losses import BINARY, CROSS_ENTROPY, OF_MODEL, SQUARED, loss_name, metric_names
from mixnorm_lab.tasks.first_look import Look, task_of
from mixnorm_lab.tasks.losses import loss_of
from mixnorm_lab.tasks.metrics import total_of, wrong_answers
from mixnorm_lab.tasks.shapes import kind_of

CLASSES = torch.tensor([0, 2, 1, 2])
ONE_HOT = F.one_hot(CLASSES, 3).float()


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("shape", "labels", "kind", "loss", "metric"),
    [
        ((4, 3), CLASSES, "classes", CROSS_ENTROPY, "accuracy"),
        ((4, 3), CLASSES.int().view(4, 1), "classes", CROSS_ENTROPY, "accuracy"),
        ((4, 3), ONE_HOT, "classes", CROSS_ENTROPY, "accuracy"),
        ((2, 3, 5), torch.ones(2, 5, dtype=torch.long), "classes", CROSS_ENTROPY, "accuracy"),
        ((2, 5, 3), torch.ones(2, 5, dtype=torch.long), "classes", CROSS_ENTROPY, "accuracy"),
        ((4, 3, 2, 2), CLASSES.view(4, 1, 1).expand(4, 2, 2), "masks", CROSS_ENTROPY, "mean IoU"),
        ((4, 3, 2, 2), CLASSES.view(4, 1, 1, 1).expand(4, 1, 2, 2), "masks", CROSS_ENTROPY, "mean IoU"),
        ((4, 1), CLASSES % 2, "binary", BINARY, "accuracy"),
        ((4,), CLASSES > 1, "binary", BINARY, "accuracy"),
        ((4, 1), CLASSES + 0.5, "values", SQUARED, "mean squared error"),
        ((4, 3), ONE_HOT * 2, "values", SQUARED, "mean squared error"),
    ],
)
def test_labels_say_what_the_task_is(shape, labels, kind, loss, metric):
    logits = randn(*shape)
    assert kind_of(logits, labels) == kind
    assert task_of(Look({}, {}, kind), None, None, "") == (loss, metric)
    assert loss_of(loss, logits, labels).isfinite()


@pytest.mark.parametrize(
    ("shape", "labels", "sentence"),
    [
        ((4, 2), CLASSES, "the labels hold 2, but the model has 2 outputs, for classes 0 to 1: give the model at least 3"),
        ((4, 3), CLASSES - 1, "the labels hold -1, .*: number the classes from 0"),
        ((1, 3, 1, 2), torch.tensor([[[1, 255]]]), "the labels hold 255, .* mark pixels to leave out with -100"),
        ((4, 1), CLASSES, r"whole numbers of the shape \(4,\), but .* \(4, 1\): return one output for each class, or make"),
        (
            (4, 3, 8, 8),
            CLASSES.view(4, 1, 1).expand(4, 2, 2),
            r"\(4, 2, 2\), but the model's output has the shape \(4, 3, 8, 8",
        ),
        ((4, 3), torch.ones(4), r"floats of the shape \(4,\), but .* \(4, 3\): return as many numbers as there are labels"),
    ],
)
def test_what_does_not_fit_is_one_sentence(shape, labels, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        kind_of(randn(*shape), labels)
    assert "\n" not in str(caught.value)


def test_a_label_that_counts_for_nothing_is_no_class():
    labels = torch.tensor([[[0, -100], [1, 2]]])
    logits = randn(1, 3, 2, 2)
    assert kind_of(logits, labels) == "masks"
    wrong, known = wrong_answers(logits, labels)
    assert known.sum() == 3
    assert not wrong[~known].any()


def test_floats_of_0_and_1_must_be_told_apart():
    look = Look({}, {}, kind_of(randn(4, 1), torch.tensor([0.0, 1, 1, 0])))
    with pytest.raises(ValueError, match=r"floats of 0 and 1: say --loss 'binary cross-entropy' .*, or --loss 'mean"):
        task_of(look, None, None, "")
    assert task_of(look, BINARY, None, "") == (BINARY, "accuracy")
    assert task_of(look, SQUARED, None, "") == (SQUARED, "mean squared error")


def test_what_is_said_goes_before_what_the_labels_say():
    look = Look({}, {}, "classes")
    assert task_of(look, "mine:focal", None, "") == ("mine:focal", "accuracy")
    assert task_of(look, None, "loss", "") == (CROSS_ENTROPY, "loss")
    assert task_of(Look({}, {}, "masks", has_loss=True), None, None, "") == (OF_MODEL, "mean IoU")
    assert task_of(Look({}, {}), None, None, "mine:step")[1] == "loss"
    with pytest.raises(ValueError, match="too odd"):
        task_of(Look({}, {}, unfit="too odd"), None, None, "")
    assert task_of(Look({}, {}, unfit="too odd"), "mine:loss", None, "") == ("mine:loss", "loss")


def test_numbers_in_a_column_are_compared_one_by_one():
    """(4, 1) against (4,) broadcasts to (4, 4), silently."""
    logits, labels = randn(4, 1), randn(4, seed=1)
    assert loss_of(SQUARED, logits, labels) == pytest.approx((logits[:, 0] - labels).square().mean().item())


@pytest.mark.parametrize("last", [False, True])
def test_tokens_have_their_classes_second_or_last(last):
    logits, labels = randn(2, 3, 5), torch.randint(0, 3, (2, 5), generator=torch.Generator().manual_seed(1))
    expected = F.cross_entropy(logits, labels)
    given = logits.movedim(1, -1) if last else logits
    torch.testing.assert_close(loss_of(CROSS_ENTROPY, given, labels), expected)
    assert (wrong_answers(given, labels)[0] == (logits.argmax(1) != labels)).all()


def by_batches(name, logits, labels, function=None):
    total = total_of(name, function)
    for part in (slice(0, 3), slice(3, None)):
        count = len(logits[part])
        total.add(
            logits[part], labels[part], loss_of(SQUARED, logits[part], labels[part]) if function else logits.mean(), count
        )
    return total.value(lambda value: value)


def test_metrics_are_of_all_samples_whatever_their_batches():
    logits, labels = randn(7, 2), randn(7, 2, seed=1)
    assert by_batches("mean squared error", logits, labels) == pytest.approx(F.mse_loss(logits, labels).item())
    assert by_batches("mine:lower", logits, labels, F.mse_loss) == pytest.approx(F.mse_loss(logits, labels).item())
    answers = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    assert by_batches("accuracy", logits, answers) == pytest.approx((logits.argmax(1) != answers).float().mean().item())


def test_mean_iou_by_hand():
    """Classes 0 and 1 share 2 of 4 pixels each, class 2 is nowhere, and the last pixel does not count."""
    truth = torch.tensor([[[0, 0, 0, 1, 1, 1, -100]]])
    found = torch.tensor([[[0, 0, 1, 1, 1, 0, 0]]])
    logits = F.one_hot(found, 3).movedim(-1, 1).float()
    total = total_of("mean IoU", None)
    total.add(logits, truth, logits.mean(), 1)
    assert total.value(lambda value: value) == pytest.approx((2 / 4 + 2 / 4) / 2)


def test_mean_iou_of_one_output_is_that_of_background_and_object():
    total = total_of("mean IoU", None)
    total.add(torch.tensor([[-1.0, 1, 1, 2]]), torch.tensor([[0.0, 0, 1, 1]]), torch.zeros(()), 1)
    assert total.value(lambda value: value) == pytest.approx((1 / 2 + 2 / 3) / 2)


class Largest:
    """As torchmetrics has them: a metric that no mean over batches gives."""

    def reset(self):
        self.found = []

    def update(self, logits, labels):
        self.found.append((logits - labels).abs().max())

    def compute(self):
        return max(self.found)


def test_an_object_that_adds_up_batches_itself():
    logits, labels = randn(7, 2), randn(7, 2, seed=1)
    assert by_batches("largest:lower", logits, labels, Largest()) == pytest.approx((logits - labels).abs().max().item())


def test_a_metric_returns_one_number():
    with pytest.raises(ValueError, match=r"the metric returns a tensor of the shape \(3, 2\): it must return one number"):
        by_batches("mine:lower", randn(7, 2), randn(7, 2), lambda a, b: a - b)


@pytest.mark.parametrize(
    ("text", "name"), [("mse", SQUARED), ("mean-squared-error", SQUARED), ("cross-entropy", CROSS_ENTROPY)]
)
def test_losses_by_name(text, name):
    assert loss_name(text) == name


def test_metrics_by_name():
    assert metric_names("mean-iou") == ("mean IoU", "")
    assert metric_names("mine:dice_score:higher") == ("dice score:higher", "mine:dice_score")
    assert metric_names("mine:loss:lower") == ("own loss:lower", "mine:loss")
    for text, sentence in (
        ("mine:dice", "is more of mine:dice better, or less? Say mine:dice:higher or mine:dice:lower"),
        ("dice", "there is no metric 'dice': use accuracy, mean squared error, mean IoU, loss, or my_module:function"),
    ):
        with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
            metric_names(text)
    with pytest.raises(ValueError, match="there is no loss 'hinge': use cross-entropy, mean squared error"):
        loss_name("hinge")
