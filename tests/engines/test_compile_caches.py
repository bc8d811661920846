"""Where engines keep what they compile: one folder for a machine and user, unless the user says otherwise."""

from __future__ import annotations

from pathlib import Path

from gyre.engines.compile_caches import cache_variables


def test_each_machine_has_a_folder_in_the_user_s_cache(tmp_path: Path) -> None:
    found = cache_variables({"HOME": str(tmp_path)}, "node-3")
    folder = tmp_path / ".cache/gyre/compiled/node-3"
    assert folder.is_dir()
    assert found == {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torchinductor"),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
        "SGLANG_DG_CACHE_DIR": str(folder / "deep_gemm"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }
    elsewhere = cache_variables({"HOME": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "big")}, "node-3")
    assert elsewhere["TRITON_CACHE_DIR"].startswith(str(tmp_path / "big"))


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    found = cache_variables({"HOME": str(tmp_path), "TRITON_CACHE_DIR": "/mine"}, "node-3")
    assert "TRITON_CACHE_DIR" not in found
    assert found["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))


def test_without_a_folder_that_can_be_written_nothing_is_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cache_variables({"HOME": str(tmp_path / "file")}, "node-3") == {}
    assert cache_variables({}, "node-3") == {}
