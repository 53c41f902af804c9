from toy import SCALE_EDIT, TOTAL_EDIT, ToyRepository, git


def test_apply_twice_and_revert(toy: ToyRepository) -> None:
    toy.add_patch("scale-list", SCALE_EDIT)
    toy.add_patch("total-min", TOTAL_EDIT)
    toy.lock()
    assert toy.run("apply") == 0
    text = (toy.tree / "toy/core.py").read_text()
    assert "return list(sorted(out))" in text
    assert "                value = min(value, LIMIT)\n" in text
    head = git(toy.tree, "rev-parse", "HEAD")
    assert toy.run("apply") == 0
    assert git(toy.tree, "rev-parse", "HEAD") == head
    assert toy.run("revert") == 0
    assert git(toy.tree, "status", "--porcelain") == ""
