"""Data of the user's own on disk: folders of images, tables, saved data sets, and sentences about what is wrong there."""

import csv
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mixnorm_lab import data
from mixnorm_lab.config.run_config import RESERVED, is_own
from mixnorm_lab.data.disk import image_folder, pictures, recognize, table
from mixnorm_lab.data.disk.rows import RowSource
from mixnorm_lab.models import libraries


def write_images(root, split, classes=("cat", "dog"), count=5, size=(6, 5), mode="L", suffix="png"):
    """Images with random pixels; returns those of a class by its name."""
    random, found = np.random.RandomState(0), {}
    for name in classes:
        folder = root / split / name
        folder.mkdir(parents=True)
        channels = () if mode == "L" else (3,)
        for number in range(count):
            pixels = random.randint(0, 256, (size[1], size[0], *channels)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
            found.setdefault(name, []).append(pixels)
    return found


def load(path, image_size=None, target=None):
    return data.load(recognize.name_of(path), path, image_size, target)


def write_table(path, columns):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def example(count=40):
    """Two numbers, a text of two values, an identifier, and a class that follows from the first number."""
    random = np.random.RandomState(0)
    first = random.randn(count).round(3)
    return {
        "first": first.tolist(),
        "second": (1000 + 50 * random.randn(count)).round(1).tolist(),
        "color": [("red", "blue")[number % 2] for number in range(count)],
        "name": [f"row {number}" for number in range(count)],
        "kind": ["high" if value > 0 else "low" for value in first],
    }


# --- what a path is -----------------------------------------------------------------------------------------------------


def test_names_say_what_a_path_holds(tmp_path, monkeypatch):
    write_images(tmp_path / "pets", "train")
    write_table(tmp_path / "iris.csv", {"a": [1], "b": [2]})
    assert recognize.name_of(tmp_path / "pets") == "images:pets"
    assert recognize.name_of(tmp_path / "iris.csv") == "table:iris.csv"
    monkeypatch.chdir(tmp_path / "pets")
    assert recognize.name_of(tmp_path / "pets" / ".") == "images:pets"
    for text, is_path in (("iris.csv", True), ("a/b", True), (".", True), ("digits", False), ("my_module:loaders", False)):
        assert recognize.is_path(text) is is_path, text
    assert recognize.is_on_disk("images:pets")
    assert not recognize.is_on_disk("images")


def test_reserved_words_are_no_modules_of_the_users():
    assert (*libraries.PREFIXES, *recognize.KINDS) == RESERVED
    assert is_own("my_module:build")
    assert not any(is_own(f"{word}:build") for word in RESERVED)


def test_a_digest_changes_with_the_data(tmp_path):
    write_images(tmp_path / "pets", "train")
    path = write_table(tmp_path / "t.csv", {"a": [1, 2]})
    folder, file = recognize.digest(tmp_path / "pets"), recognize.digest(path)
    assert (folder, file) == (recognize.digest(tmp_path / "pets"), recognize.digest(path))
    (tmp_path / "pets" / "train" / "cat" / "more.png").write_bytes(b"1")
    write_table(path, {"a": [1, 3]})  # of the same size
    assert recognize.digest(tmp_path / "pets") != folder
    assert recognize.digest(path) != file


def test_what_is_not_there_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*nope.csv: name a CSV or Parquet file"):
        recognize.name_of(tmp_path / "nope.csv")
    with pytest.raises(ValueError, match=r"there is no folder .*nope: name one with images"):
        recognize.name_of(tmp_path / "nope")
    with pytest.raises(ValueError, match="images:pets is read from its folder: name it with --data"):
        data.load("images:pets")
    path = write_table(tmp_path / "b.csv", {"a": [1]})
    with pytest.raises(ValueError, match=r"b.csv is table:b.csv, and not table:a.csv: name the same data"):
        data.load("table:a.csv", path)
    with pytest.raises(ValueError, match="is a table, and has no images: leave --image-size out"):
        data.load("table:b.csv", path, 32)
    write_images(tmp_path / "pets", "train")
    with pytest.raises(ValueError, match="are its folders: leave --target out"):
        load(tmp_path / "pets", target="a")
    with pytest.raises(ValueError, match="--image-size is for data of your own, in a folder or a table"):
        data.load("digits", image_size=32)


# --- folders of images --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_in_folders_of_their_classes(mode, test, tmp_path):
    train = write_images(tmp_path, "train", mode=mode)
    held_out = write_images(tmp_path, test, mode=mode, count=2)
    found = load(tmp_path)
    assert (found.num_classes, found.augment, found.name) == (2, mode == "RGB", f"images:{tmp_path.name}")
    assert found.shape == (1 if mode == "L" else 3, 5, 6)
    for images, written, count in ((found.train, train, 5), (found.test, held_out, 2)):
        assert images.labels.tolist() == [0] * count + [1] * count
        assert images.images.dtype == torch.uint8
        expected = np.stack([*written["cat"], *written["dog"]])
        expected = expected[:, None] if mode == "L" else expected.transpose(0, 3, 1, 2)
        assert np.array_equal(images.images.numpy(), expected)


def test_without_test_images_a_fixed_fifth_of_each_class_is_held_out(tmp_path):
    write_images(tmp_path, ".", count=10)
    found = load(tmp_path)
    assert found.test.labels.tolist() == [0, 0, 1, 1]
    assert found.train.labels.tolist() == [0] * 8 + [1] * 8
    again = image_folder.read("again", tmp_path)
    assert torch.equal(again.test.images, found.test.images)


def test_other_sizes_are_scaled_and_cut_around_the_middle(tmp_path):
    """A gray frame around a white middle: what is cut off is the frame at the longer side."""
    folder = tmp_path / "train"
    for name, size in (("wide", (90, 40)), ("high", (40, 90))):
        (folder / name).mkdir(parents=True)
        picture = Image.new("L", size, 10)
        picture.paste(255, (20, 0, 70, 40) if name == "wide" else (0, 20, 40, 70))  # a little more than is kept
        for number in range(5):
            picture.save(folder / name / f"{number}.png")
    assert load(tmp_path).shape == (1, 32, 32)
    assert load(tmp_path, image_size=20).train.images.unique().tolist() == [255]


@pytest.mark.parametrize(
    ("sizes", "image_size", "expected"),
    [
        ([(6, 5), (6, 5)], None, (5, 6)),
        ([(300, 300), (300, 300)], None, (224, 224)),
        ([(640, 480), (250, 333)], None, (224, 224)),
        ([(640, 480), (100, 333)], None, (64, 64)),
        ([(40, 48), (48, 40)], None, (32, 32)),
        ([(6, 5), (7, 5)], None, (32, 32)),
        ([(640, 480)], 48, (48, 48)),
    ],
)
def test_the_size_suits_the_images_unless_it_is_given(sizes, image_size, expected):
    examples = [Image.new("RGB", size) for size in sizes]
    assert pictures.shape_for(examples, image_size) == (3, *expected)


def test_images_that_cannot_be_used_say_so(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no images \(.png, .*put images into train/CLASS/ and test/CLASS/"):
        load(tmp_path / "empty")
    write_images(tmp_path / "one", "train", classes=["cat"])
    with pytest.raises(ValueError, match="has images of one class, cat: put those of each class into a folder"):
        load(tmp_path / "one")
    write_images(tmp_path / "differ", "train", classes=["cat", "dog"])
    write_images(tmp_path / "differ", "test", classes=["cat", "cow"])
    with pytest.raises(ValueError, match=r"different classes \(only in train: dog; only in test: cow\): name them alike"):
        load(tmp_path / "differ")
    write_images(tmp_path / "damaged", "train")
    whole = (tmp_path / "damaged" / "train" / "dog" / "3.png").read_bytes()
    (tmp_path / "damaged" / "train" / "dog" / "3.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"3.png cannot be read as an image \(.*\): mend it, or remove it"):
        load(tmp_path / "damaged")
    (tmp_path / "damaged" / "train" / "dog" / "0.png").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"0.png is no image that Pillow can read"):
        load(tmp_path / "damaged", image_size=4)
    write_images(tmp_path / "deep", "train")
    Image.fromarray(np.full((5, 6), 40_000, np.uint16)).save(tmp_path / "deep" / "train" / "dog" / "1.png")
    with pytest.raises(ValueError, match=r"1.png cannot be read as an image \(its pixels are I;16, not 8 bits a channel\)"):
        load(tmp_path / "deep")
    monkeypatch.setattr(pictures, "MOST_BYTES", 100)
    write_images(tmp_path / "many", "train")
    with pytest.raises(ValueError, match=r"the 10 images of .* at most .* use a smaller --image-size"):
        load(tmp_path / "many")


# --- tables -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_table_of_numbers_and_texts(suffix, tmp_path):
    columns = example()
    found = load(write_table(tmp_path / f"t.{suffix}", columns), target="kind")
    assert (found.num_classes, found.shape, found.left_out, found.has_rows) == (2, (4,), ("name",), True)
    assert len(found.train) == 32
    assert len(found.test) == 8
    # A fifth of each class, in the old order, with "high" before "low".
    high = columns["kind"].count("high")
    assert found.test.labels.tolist().count(0) == round(0.2 * high)
    rows = torch.cat([found.train.images, found.test.images])
    labels = torch.cat([found.train.labels, found.test.labels])
    kept = {round(value, 2): kind for value, kind in zip(columns["first"], columns["kind"], strict=True)}
    # Standardized by the training rows alone; the text is two columns of 0 and 1.
    torch.testing.assert_close(found.train.images[:, :2].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.train.images[:, :2].std(0, unbiased=False), torch.ones(2), atol=1e-5, rtol=0)
    assert found.test.images[:, :2].mean(0).abs().max() > 0.01
    assert torch.equal(rows[:, 2:].sum(1), torch.ones(40))
    assert torch.equal(rows[:, 2:].sum(0), torch.tensor([20.0, 20.0]))
    assert len(kept) == 40
    split = rows[labels == 0][:, 0].min() > rows[labels == 1][:, 0].max()  # as the class follows from the first number
    assert split


def test_numbers_to_predict(tmp_path):
    columns = example()
    columns["price"] = [100 + 3 * value for value in columns["first"]]
    found = load(write_table(tmp_path / "t.csv", columns), target="price")
    assert (found.num_classes, found.predicts_numbers, found.train.labels.dtype) == (1, True, torch.float32)
    torch.testing.assert_close(found.train.labels.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.train.labels.square().mean(), torch.tensor(1.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.test.labels, found.test.images[:, 0], atol=1e-3, rtol=0)  # both in units of training
    held_out = data.validation_split(found, 0.25)
    assert (len(held_out.train), len(held_out.test)) == (24, 8)


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["yes", "no"] * 20, 2),
        ([1, 2, 3, 4] * 10, 4),
        (["1.0", "2.0"] * 20, 2),
        ([0.5, 1.5] * 20, 1),
        (list(range(40)), 1),
        ([True, False] * 20, 2),
    ],
)
def test_few_whole_numbers_and_texts_are_classes(values, classes, tmp_path):
    found = load(write_table(tmp_path / "t.csv", example() | {"target": values}), target="target")
    assert found.num_classes == classes
    assert found.predicts_numbers == (classes == 1)


def test_a_text_that_training_rows_do_not_have_is_no_column(tmp_path):
    train = {"color": ["red", "blue"] * 10, "label": ["a", "b"] * 10}
    test = {"color": ["green", "red"], "label": ["a", "b"]}
    found = table.rows("t", "t", train, test, "label")
    assert found.train.images[:2].tolist() == [[0, 1], [1, 0]]
    assert found.test.images.tolist() == [[0, 0], [0, 1]]


def test_columns_of_lists_are_as_many_as_the_lists_are_long():
    train = {"embedding": [[float(number), 1.0, 2.0] for number in range(20)], "label": ["a", "b"] * 10}
    found = table.rows("t", "t", train, None, "label")
    assert found.shape == (3,)
    assert found.train.images[:, 2].unique().tolist() == [0]  # a constant says nothing


@pytest.mark.parametrize(
    ("text", "target", "sentence"),
    [
        ("a,b\n1,2\n", None, "which column of .* is to be predicted[?] Say --target with one of a, b$"),
        ("a,kind\n1,2\n", "kinds", "has no column 'kinds': choose --target from kind$"),
        ("a,b\n1,2\n", "xyz", "has no column 'xyz': choose --target from a, b$"),
        (
            "a,b\n1,\n,\n1,2\n?,NaN\n",
            "b",
            r"3 of 4 rows of .* miss values \(b: 3, a: 2\): fill them in, or remove those rows",
        ),
        ("a,b\n1,2\n1,2,3\n", "b", "row 3 of .* has 3 values, but there are 2 columns: mend that row"),
        ("a;b\n1;2\n", "b", "t.csv has ';' between its columns: save it with commas$"),
        ("a,b\n1,2\n-Inf,3\n", "b", r"1 of 2 rows of .* miss values \(a: 1\)"),
        ("a,b\n1,2\n", "b", "a share of 0.2 of 1 samples leaves one side empty: use another between 0 and 1, or more data$"),
        ("a,a\n1,2\n", "a", "several columns 'a': give each a name of its own"),
        ("a,b\n", "b", "has no rows below its names of columns"),
        ("", "b", "has no rows below its names of columns"),
        ("a,b\n1,x\n2,y\n", "b", "has 2 different texts in 2 rows: choose a --target whose values repeat"),
        ("a,b\n1,x\n2,x\n", "b", "has one value alone, x: choose another --target"),
        ("b\nx\ny\nx\ny\nx\ny\nx\ny\nx\ny\n", "b", "has no column beside b to predict it from"),
    ],
)
def test_a_table_that_cannot_be_used_says_so(text, target, sentence, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path / "t.csv", target=target)


def test_many_columns_are_listed_by_the_first_and_the_last():
    assert table.listed(map(str, range(30))) == "0, 1, 2, 3, 4, 5, 6, 7, …, 27, 28, 29"


def test_text_that_is_no_utf8_says_so(tmp_path):
    (tmp_path / "t.csv").write_bytes("größe,b\n1,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"cannot be read as CSV .*: save it as UTF-8 with commas"):
        load(tmp_path / "t.csv", target="b")


@pytest.mark.slow
def test_a_parquet_file_is_the_same_table(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    pyarrow.parquet.write_table(pyarrow.table(example()), tmp_path / "t.parquet")
    ours, theirs = (
        load(path, target="kind") for path in (tmp_path / "t.parquet", write_table(tmp_path / "t.csv", example()))
    )
    assert torch.equal(ours.train.images, theirs.train.images)
    assert torch.equal(ours.test.labels, theirs.test.labels)
    (tmp_path / "bad.parquet").write_bytes(b"text")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        load(tmp_path / "bad.parquet", target="kind")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"text")
    with pytest.raises(ValueError, match="pip install pyarrow, or save the table as CSV"):
        load(tmp_path / "t.parquet", target="kind")


# --- batches of rows ----------------------------------------------------------------------------------------------------


def source(**options):
    found = table.rows("t", "t", {name: [str(v) for v in values] for name, values in example(50).items()}, None, "kind")
    return found, RowSource(found, 8, device=torch.device("cpu"), **options)


def test_an_epoch_has_each_row_once_but_for_those_that_fill_no_batch():
    found, rows = source()
    assert (rows.steps_per_epoch, rows.num_classes, rows.shape) == (len(found.train) // 8, 2, (4,))
    epochs = []
    for epoch in (0, 1, 0):
        rows.start_epoch(seed=3, epoch=epoch)
        epochs.append(torch.cat([rows.batch(torch.tensor(step))[0] for step in range(rows.steps_per_epoch)]))
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])
    assert len(epochs[0].unique(dim=0)) == rows.steps_per_epoch * 8
    tested = list(rows.test_batches(8))
    assert torch.equal(torch.cat([images for images, _ in tested]), found.test.images)
    assert torch.equal(torch.cat([labels for _, labels in tested]), found.test.labels)
    plain = list(rows.plain_train_batches(16, 20))
    assert torch.equal(plain[0][0][0], found.train.images[0])
    assert sum(len(labels) for _, labels in plain) == 20


def test_the_shares_of_ranks_are_the_batch():
    _, whole = source()
    parts = [source(share=(rank, 2))[1] for rank in range(2)]
    for one in (whole, *parts):
        one.start_epoch(seed=0, epoch=0)
    for step in range(whole.steps_per_epoch):
        images, labels = whole.batch(torch.tensor(step))
        found = [part.batch(torch.tensor(step)) for part in parts]
        assert torch.equal(torch.cat([batch[0] for batch in found]), images)
        assert torch.equal(torch.cat([batch[1] for batch in found]), labels)


def test_a_batch_size_that_does_not_fit_says_so():
    found, _ = source()
    for size in (1, 1000):
        with pytest.raises(ValueError, match=f"batch_size={size} makes no batch of 40 training rows: use 2 to 40"):
            RowSource(found, size, device=torch.device("cpu"))


# --- saved data sets ----------------------------------------------------------------------------------------------------


def test_a_saved_data_set_without_datasets_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ValueError, match="is a saved data set, which needs datasets: pip install datasets"):
        load(tmp_path)


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


@pytest.mark.slow
class TestSavedDataSets:
    def images(self, datasets, count, label):
        random = np.random.RandomState(count)
        arrays = [random.randint(0, 256, (5, 6, 3)).astype(np.uint8) for _ in range(count)]
        features = datasets.Features({"img": datasets.Image(), "label": label})
        labels = [number % 2 for number in range(count)]
        images = [Image.fromarray(array) for array in arrays]
        return datasets.Dataset.from_dict({"img": images, "label": labels}, features=features), arrays

    def test_images_with_labels(self, datasets, tmp_path):
        label = datasets.ClassLabel(names=["cat", "dog"])
        (train, arrays), (test, _) = self.images(datasets, 10, label), self.images(datasets, 4, label)
        datasets.DatasetDict({"train": train, "validation": test}).save_to_disk(str(tmp_path / "pets"))
        found = load(tmp_path / "pets")
        assert (found.name, found.num_classes, found.shape) == ("dataset:pets", 2, (3, 5, 6))
        assert np.array_equal(found.train.images.numpy(), np.stack(arrays).transpose(0, 3, 1, 2))
        assert found.test.labels.tolist() == [0, 1, 0, 1]

    def test_one_split_is_divided_and_an_unknown_target_says_so(self, datasets, tmp_path):
        self.images(datasets, 10, datasets.Value("int64"))[0].save_to_disk(str(tmp_path / "pets"))
        found = load(tmp_path / "pets", image_size=8)
        assert (len(found.train), len(found.test), found.shape) == (8, 2, (3, 8, 8))
        with pytest.raises(ValueError, match="has no column 'breed': choose --target from img, label"):
            load(tmp_path / "pets", target="breed")

    def test_columns_of_features(self, datasets, tmp_path):
        columns = {
            "x": [[float(number), 1.0 - number] for number in range(100)],
            "label": [number % 25 for number in range(100)],
        }
        features = datasets.Features(
            {"x": datasets.Sequence(datasets.Value("float32"), length=2), "label": datasets.ClassLabel(num_classes=25)}
        )
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "t"))
        assert load(tmp_path / "t").num_classes == 25  # classes, though their names are numbers
        columns["label"] = [number % 3 for number in range(100)]
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "u"))
        found = load(tmp_path / "u")
        assert (found.num_classes, found.shape, found.has_rows) == (3, (2,), True)

    def test_a_set_without_train_says_so(self, datasets, tmp_path):
        one = self.images(datasets, 4, datasets.ClassLabel(names=["cat", "dog"]))[0]
        datasets.DatasetDict({"all": one}).save_to_disk(str(tmp_path / "pets"))
        with pytest.raises(ValueError, match="has the splits all, but no train: save it with one"):
            load(tmp_path / "pets")
