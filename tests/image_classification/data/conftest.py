"""Images to load, and the small ImageNet in two forms with the bytes that each gives."""

import pytest

from tests.image_classification.imagenet import content_of, prepared, write_folders, write_tars
from tests.image_classification.loading import CountedImages, write_images


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def images(image_folder):
    return CountedImages(image_folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="session")
def tars(tmp_path_factory):
    return write_tars(tmp_path_factory.mktemp("tars"))


@pytest.fixture(scope="session")
def expected(folders, tmp_path_factory):
    directory = tmp_path_factory.mktemp("expected") / "full"
    prepared(directory, folders)
    return content_of(directory)
