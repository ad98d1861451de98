"""launch/serve.py as a person gives it. Its work is tested in tests/harness/test_serving.py."""

import scripts


def test_a_missing_run_and_an_empty_key_are_one_sentence(tmp_path):
    missing = scripts.run_forked("serve.py", f"--workdir={tmp_path / 'none'}")
    scripts.assert_one_sentence(
        missing, f"--workdir={tmp_path / 'none'}: holds no config.json", "give the folder of a run"
    )
    keyless = scripts.run_forked("serve.py", f"--workdir={tmp_path}", "--key_env=NO_SUCH_KEY")
    scripts.assert_one_sentence(keyless, "--key_env: the environment has no variable NO_SUCH_KEY")
    assert keyless.returncode == 2
