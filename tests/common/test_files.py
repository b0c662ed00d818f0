"""Files that several processes write."""

from concurrent.futures import ThreadPoolExecutor

from common.files import save_text


def test_writers_of_one_file_take_turns(tmp_path):
    path = tmp_path / "folder" / "report.html"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: save_text(path, str(number)), range(40)))
    assert int(path.read_text()) in range(40) and list(path.parent.iterdir()) == [path]
