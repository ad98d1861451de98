"""launch/evaluate.py as a person gives it. Its work is tested in tests/build/test_evaluating.py."""

import scripts


def test_a_missing_run_and_a_mistyped_k_are_one_sentence(tmp_path):
    missing = scripts.run_forked("evaluate.py", f"--workdir={tmp_path / 'none'}")
    scripts.assert_one_sentence(
        missing, f"--workdir={tmp_path / 'none'}: holds no config.json", "give the folder of a run"
    )
    mistyped = scripts.run_forked("evaluate.py", f"--workdir={tmp_path}", "--k=1,two")
    scripts.assert_one_sentence(mistyped, "--k: 'two' is not a whole number; write it as --k=1,4,8")
    assert mistyped.returncode == 2
