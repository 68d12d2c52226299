"""Commands that compile nothing do not import `torch._dynamo`, and what needs it gets the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test imports PyTorch in a process of its own

INSTALLED = "import sys\nfrom pipelines.terminal.deferred_dynamo import install\ninstall()\n"


def run(code: str, folder: Path | None = None) -> str:
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("backbone", ["timm/test_resnet", "torchvision/shufflenet_v2_x0_5"])
def test_embed_and_search_do_not_import_dynamo(backbone: str, folder: Path, tmp_path: Path) -> None:
    for words in (
        ["embed", str(folder), "-o", "out", "-b", backbone, "--weights", "random", "--compile", "off"],
        ["search", "out", str(folder / "ant" / "00.png")],
    ):
        code = (
            f"import sys\nsys.argv[1:] = {words}\nimport layertap\ntry: layertap.main()\n"
            "finally: print({'torch', 'torchvision', 'timm', 'torch._dynamo', 'sympy'} & set(sys.modules))"
        )
        imported = run(code, tmp_path).splitlines()[-1]
        assert "'torch'" in imported
        assert backbone.partition("/")[0] in imported
        assert "_dynamo" not in imported
        assert "sympy" not in imported


def test_functions_that_need_dynamo_get_the_real_one() -> None:
    code = INSTALLED + (
        "import torch, torchvision, timm\n"
        "from torchvision import ops, tv_tensors\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "image = tv_tensors.Image(torch.arange(48.0).reshape(3, 4, 4))\n"
        "assert type(tv_tensors.wrap(image + 1, like=image)) is tv_tensors.Image\n"
        "import torch._dynamo\n"
        "assert hasattr(torch._dynamo, 'optimize')\n"
        "boxes = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]])\n"
        "pooled = ops.roi_align(torch.ones(1, 2, 4, 4), boxes, output_size=2)\n"
        "assert torch.equal(pooled, torch.ones(1, 2, 2, 2))\n"
        "model = timm.create_model('test_resnet').eval()\n"
        "images = torch.rand(2, 3, 64, 64)\n"
        "graphs = []\n"
        "def backend(graph, inputs): graphs.append(graph); return graph\n"
        "with torch.no_grad(): compiled = torch.compile(model, backend=backend)(images)\n"
        "assert len(graphs) == 1\n"
        "assert torch.equal(compiled, model(images))\n"
    )
    run(code)


def test_a_library_that_needs_more_of_dynamo_is_imported_with_it(tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text(
        "runs = globals().get('runs', 0) + 1\n"
        "from torch._dynamo import config\n"
        "import torch\n"
        "disable = torch._dynamo.disable\n"
    )
    code = INSTALLED + (
        "import timm, torch._dynamo\n"
        "assert timm.disable is torch._dynamo.disable\n"
        "assert timm.config is torch._dynamo.config\n"
        "assert timm.runs == 2\n"
    )
    run(code, tmp_path)


def test_a_library_that_cannot_be_imported_raises_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text("import no_such_library\n")
    code = INSTALLED + (
        "try: import timm\nexcept ModuleNotFoundError as error: print(error.name, 'timm' in sys.modules)\n"
    )
    assert run(code, tmp_path) == "no_such_library False\n"
