"""``import dpcore.as_opacus``: software that imports Opacus, and that nobody can edit, runs on dpcore."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import math
import os
import pkgutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import dpcore
from dpcore import GradSampleModule
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.opacus_names.alias import installed
from dpcore.opacus_names.running import main
from dpcore.opacus_names.table import _REASON_OF, PLACES, VERSION
from dpcore.optimizers import DPOptimizer
from tests.dpcore.test_opacus_scripts import SCRIPTS, _run

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
UNUSED = {"fix", "validate"}  # of opacus.validators: the last of its modules' functions, by an import *


def _all_of_opacus() -> dict[str, list[str]]:
    """Module -> the functions and classes of Opacus' that it defines, public ones and those that others take."""
    found = {"": ["PrivacyEngine", "GradSampleModule"]}
    for module in pkgutil.walk_packages(opacus.__path__, "opacus."):
        place = module.name.removeprefix("opacus.")
        if place.startswith("tests"):
            continue
        theirs = importlib.import_module(module.name)
        names = [name for name, value in vars(theirs).items() if not name.startswith("_") and _of_opacus(value)]
        found[place] = [name for name in names if not (place == "validators" and name in UNUSED)]
    return found


def _of_opacus(value: object) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("opacus.")


def test_every_name_of_opacus_is_handed_out():
    wanted = _all_of_opacus()
    missing = []
    with installed():
        for place, names in wanted.items():
            found = importlib.import_module(f"opacus.{place}".rstrip("."))
            missing += [f"{place}.{name}" for name in names if not hasattr(found, name)]
            assert not any(_of_opacus(value) for value in vars(found).values()), place
    assert not missing and set(wanted) <= set(PLACES)


def test_objects_are_dpcores_own_and_opacus_is_back_behind_the_block():
    with installed():
        from opacus import PrivacyEngine
        from opacus.optimizers import optimizer as module
        from opacus.optimizers.optimizer import DPOptimizer as theirs

        stand_in = sys.modules["opacus"]
        assert PrivacyEngine is dpcore.PrivacyEngine and theirs is DPOptimizer is module.DPOptimizer
        assert stand_in.optimizers.optimizer is module and stand_in.__version__ == VERSION
        assert importlib.metadata.version("opacus") == VERSION == importlib.metadata.metadata("opacus")["Version"]
        assert hasattr(DPOptimizer, "_step_skip_queue") and hasattr(GradSampleModule, "GRAD_SAMPLERS")
        with pytest.raises(ImportError):
            importlib.import_module("opacus.nothing")
        with pytest.raises(AttributeError, match=r"which is dpcore's, has no attribute 'nothing'"):
            stand_in.nothing  # noqa: B018
    assert sys.modules["opacus"] is opacus and not hasattr(DPOptimizer, "_step_skip_queue")
    assert not hasattr(GradSampleModule, "GRAD_SAMPLERS") and not GradSampleModule.lives_with_module


@pytest.mark.parametrize("name", _REASON_OF)
def test_a_name_without_a_meaning_is_refused_when_it_is_used(name):
    place = next(place for place, names in PLACES.items() if name in names.split())
    with installed():
        what = getattr(importlib.import_module(f"opacus.{place}"), name)
    assert not isinstance(nn.Linear(1, 1), what)
    for use in (lambda: what(), lambda: type("Mine", (what,), {}), lambda: what.something):
        with pytest.raises(UnsupportedError, match=rf"{name} of Opacus has no counterpart in dpcore: .*\."):
            use()


LAYERS = {
    "linear": (nn.Linear(4, 3), torch.randn(5, 4)),
    "linear of sequences": (nn.Linear(4, 3), torch.randn(5, 2, 4)),
    "conv": (nn.Conv2d(4, 6, 3, padding=1, groups=2), torch.randn(5, 4, 6, 6)),
    "conv1": (nn.Conv1d(4, 6, 3, stride=2), torch.randn(5, 4, 9)),
    "embedding": (nn.Embedding(9, 3), torch.randint(9, (5, 4))),
    "group_norm": (nn.GroupNorm(2, 4), torch.randn(5, 4, 3)),
    "instance_norm": (nn.InstanceNorm2d(4, affine=True), torch.randn(5, 4, 3, 3)),
    "layer_norm": (nn.LayerNorm(4), torch.randn(5, 2, 4)),
    "rms_norm": (nn.RMSNorm(4), torch.randn(5, 2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rules_of_layers_are_opacus(name):
    layer, x = LAYERS[name]
    function = f"compute_{name.split()[0].rstrip('1')}_grad_sample"
    gradient = torch.randn_like(layer(x))
    theirs = getattr(importlib.import_module("opacus.grad_sample"), function)(layer, [x], gradient)
    with installed():
        ours = getattr(importlib.import_module("opacus.grad_sample"), function)(layer, [x], gradient)
    assert ours.keys() == theirs.keys()
    for param, value in theirs.items():
        torch.testing.assert_close(ours[param], value, rtol=1e-4, atol=1e-5)


def test_the_table_of_rules_can_be_read_and_written():
    class Scaled(nn.Linear):
        pass

    with installed():
        rules = GradSampleModule.GRAD_SAMPLERS
        assert nn.Linear in rules and Scaled not in rules and len(rules) == len(list(rules))
        rules[Scaled] = rule = lambda layer, activations, backprops: {}
        assert rules[Scaled] is rule
        del rules[Scaled]
        assert Scaled not in rules


def test_functions_of_the_accountants_are_opacus():
    run = {"noise_multiplier": 1.1, "steps": 300}
    orders = [1.5, 2, 4.5, 16, 40]
    seen = []
    for alias in (False, True):
        with installed() if alias else warnings.catch_warnings():
            rdp = importlib.import_module("opacus.accountants.analysis.rdp")
            gdp = importlib.import_module("opacus.accountants.analysis.gdp")
            divergences = rdp.compute_rdp(q=0.02, orders=orders, **run)
            epsilon, order = rdp.get_privacy_spent(orders=orders, rdp=divergences, delta=1e-5)
            seen.append([*divergences, epsilon, order, rdp.compute_rdp(q=0.02, orders=3.0, **run)])
            for kind in ("poisson", "uniform"):
                mu = getattr(gdp, f"compute_mu_{kind}")(sample_rate=0.02, **run)
                seen[-1] += [mu, getattr(gdp, f"compute_eps_{kind}")(sample_rate=0.02, delta=1e-5, **run)]
                seen[-1] += [gdp.eps_from_mu(mu=mu, delta=1e-5), gdp.delta_eps_mu(eps=1.0, mu=mu)]
    theirs, ours = seen
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(theirs, ours, strict=True))


def test_noise_is_calibrated_by_the_accountant_that_opacus_takes():
    options = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.02, "steps": 100}
    with installed():
        from opacus.accountants.utils import get_noise_multiplier

        found = get_noise_multiplier(**options)
        assert found == get_noise_multiplier(accountant="rdp", **options)
    theirs = importlib.import_module("opacus.accountants.utils").get_noise_multiplier(**options)
    assert found <= theirs and math.isclose(found, theirs, rel_tol=1e-2)
    assert found > dpcore.accountants.utils.get_noise_multiplier(**options)


def test_small_functions_are_opacus():
    x, module = torch.randn(3, 2, 7, 8), nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LayerNorm(3))
    module[2].bias.requires_grad_(False)
    windows = {"kernel_size": (3, 2), "stride": (2, 1), "dilation": (1, 2)}
    seen = []
    for alias in (False, True):
        with installed() if alias else warnings.catch_warnings():
            tensors = importlib.import_module("opacus.utils.tensor_utils")
            modules = importlib.import_module("opacus.utils.module_utils")
            lengths = importlib.import_module("opacus.utils.packed_sequences").compute_seq_lengths
            params = importlib.import_module("opacus.optimizers.utils").params
            seen.append([
                *(tensors.unfold2d(x, padding=padding, **windows) for padding in ((1, 2), "same", "valid")),
                *tensors.calc_sample_norms([("a", x), ("b", x[:, 0, 0, 0])], flat=True),
                *tensors.calc_sample_norms([("a", x), ("b", x[:, 0])], flat=False),
                tensors.sum_over_all_but_batch_and_last_n(x, 1),
                torch.tensor(lengths(torch.tensor([4, 2, 2, 1]))),
                torch.tensor([
                    modules.has_trainable_params(module), modules.has_trainable_params(module[0]),
                    modules.requires_grad(module), modules.requires_grad(module, recurse=True),
                    modules.are_state_dict_equal(module.state_dict(), modules.clone_module(module).state_dict()),
                    len(list(modules.parametrized_modules(module))), len(list(modules.trainable_modules(module))),
                    len(list(modules.trainable_parameters(module))),
                    len(params(torch.optim.SGD(module.parameters(), lr=0.1))),
                ]),
            ])  # fmt: skip
    for theirs, ours in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)


def _by_hand(net, **options):
    wrapped = GradSampleModule(net)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 1, **options}
    return wrapped, DPOptimizer(sgd, **settings)


def test_what_programs_read_of_the_optimizer():
    with installed():
        wrapped, optimizer = _by_hand(nn.Linear(4, 2))
        for goes_on in (True, False):
            optimizer.signal_skip_step(goes_on)
        assert optimizer._step_skip_queue == [True, False] and optimizer._check_skip_next_step(pop_next=False)
        with pytest.raises(UnsupportedError, match="_step_skip_queue was changed"):
            while optimizer._step_skip_queue:
                optimizer._step_skip_queue.pop(0)
        seen = []
        assert optimizer.step_hook is None and optimizer.generator is None and not optimizer.secure_mode
        optimizer.attach_step_hook(seen.append)
        for _ in range(2):
            wrapped(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            seen.append(optimizer._is_last_step_skipped)
        assert seen == [True, optimizer, False] and optimizer._step_skip_queue == []
        optimizer.step_hook(optimizer)
        assert seen[-1] is optimizer
        for name in ("step_hook", "_is_last_step_skipped", "_step_skip_queue"):
            with pytest.raises(UnsupportedError, match=f"DPOptimizer sets {name}, which is read only; call"):
                setattr(optimizer, name, None)


def test_a_step_of_ones_own_around_the_optimizer_is_one_sentence():
    with installed():
        wrapped, optimizer = _by_hand(nn.Linear(4, 2))
        wrapped(torch.randn(3, 4)).sum().backward()
        optimizer.clip_and_accumulate()
        with pytest.raises(UnsupportedError, match=r"a step of one's own would release .* Call optimizer\.step\(\)"):
            optimizer._check_skip_next_step()
        with pytest.raises(PrivacyError):
            optimizer.step()  # the sum is forgotten


def test_an_optimizer_written_with_opacus_helpers_trains():
    """Clipping and noise of one's own, from p.grad_sample, as programs write it for Opacus."""
    with installed():
        from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise, _mark_as_processed

        class Own(DPOptimizer):
            def clip_and_accumulate(self):
                norms = torch.stack([g.flatten(1).norm(2, dim=1) for g in self.grad_samples], 1).norm(2, dim=1)
                factor = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
                for p in self.params:
                    _check_processed_flag(p.grad_sample)
                    grad = torch.einsum("i,i...", factor, self._get_flat(p))
                    p.summed_grad = grad if p.summed_grad is None else p.summed_grad + grad
                    _mark_as_processed(p.grad_sample)

            def _get_flat(self, p):
                return p.grad_sample

            def add_noise(self):
                for p in self.params:
                    std = self.noise_multiplier * self.max_grad_norm
                    noise = _generate_noise(std, p.summed_grad, self.generator, self.secure_mode)
                    p.grad = (p.summed_grad + noise).view_as(p)

        torch.manual_seed(0)
        net, x = nn.Linear(4, 2), torch.randn(6, 4)
        start = net.weight.detach().clone()
        wrapped = GradSampleModule(net)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer = Own(sgd, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=6)
        (wrapped(x).square().sum(1)).mean().backward()
        optimizer.step()
        assert 0 < (net.weight - start).norm() <= 0.5
        marked = torch.zeros(2)
        _mark_as_processed(marked)
        with pytest.raises(PrivacyError, match="are in a sum already"):
            _check_processed_flag([marked])
        seeded = [_generate_noise(2.0, torch.zeros(4000), torch.Generator().manual_seed(1)) for _ in range(2)]
        assert torch.equal(*seeded) and abs(float(seeded[0].std()) - 2) < 0.1
        secret = [_generate_noise(2.0, torch.zeros(4000), secure_mode=secure) for secure in (False, False, True)]
        assert not torch.equal(*secret[:2]) and all(abs(float(noise.std()) - 2) < 0.1 for noise in secret)
        assert not _generate_noise(0.0, torch.zeros(9)).any()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_cuts_index_lists_announces_its_pieces(workers):
    """With workers it draws ahead of the steps, and what tells its pieces apart is the memory manager's affair."""
    with installed():
        from opacus.utils.batch_memory_manager import BatchSplittingSampler

        wrapped, optimizer = _by_hand(nn.Linear(12, 1, bias=False), loss_reduction="mean")
        updates = []
        optimizer.original_optimizer.register_step_post_hook(
            lambda *_: updates.append(wrapped.weight.grad.flatten().nonzero().flatten().tolist())
        )
        lists = [[0, 3, 5, 8, 11], [1], [], [2, 3, 4, 6]]
        sampler = BatchSplittingSampler(sampler=lists, max_batch_size=2, optimizer=optimizer)
        assert len(sampler) == 4
        collate = lambda rows: torch.stack(rows) if rows else torch.zeros(0, 12)  # noqa: E731
        loader = DataLoader(torch.eye(12), batch_sampler=sampler, num_workers=workers, collate_fn=collate)
        with pytest.raises(PrivacyError, match="BatchMemoryManager") if workers else contextlib.nullcontext():
            for x in loader:
                optimizer.zero_grad()
                wrapped(x).sum(1).mean().backward() if len(x) else wrapped(x).sum().backward()
                optimizer.step()
        assert updates == [] if workers else lists


def test_a_wrapper_that_nobody_keeps_goes_on_recording():
    """Made for its side effect: graph nets and federated clients call the model itself."""
    for alias in (False, True):
        with installed() if alias else warnings.catch_warnings():
            net = nn.Linear(4, 2)
            GradSampleModule(net)
            sgd, settings = torch.optim.SGD(net.parameters(), lr=0.1), {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
            if not alias:
                with pytest.raises(PrivacyError, match="GradSampleHooks"):
                    DPOptimizer(sgd, expected_batch_size=6, **settings)
                continue
            optimizer = DPOptimizer(sgd, expected_batch_size=6, **settings)
            before = net.weight.detach().clone()
            net(torch.randn(6, 4)).sum().backward()
            optimizer.step()
            assert (before != net.weight).all() and optimizer.steps == 1


def test_a_wrapper_that_captures_by_itself_is_refused_by_name():
    with installed(), pytest.raises(UnsupportedError, match=r"Mine overrides capture_backprops_hook\(\)"):
        type("Mine", (GradSampleModule,), {"capture_backprops_hook": lambda self: None})
    type("Mine", (GradSampleModule,), {"capture_backprops_hook": lambda self: None})


def test_the_order_of_a_loader_can_be_given_another_generator():
    data = TensorDataset(torch.arange(20))
    loader = DataLoader(data, sampler=RandomSampler(data), batch_size=5)
    with installed():
        from opacus.data_loader import DPDataLoader, switch_generator

        orders = []
        for _ in range(2):
            switched = switch_generator(data_loader=loader, generator=torch.Generator().manual_seed(4))
            orders.append([x for (x,) in switched])
        assert all(torch.equal(a, b) for a, b in zip(*orders, strict=True))
        with pytest.raises(UnsupportedError, match="draws Poisson samples by a seed"):
            switch_generator(data_loader=DPDataLoader(data, sample_rate=0.5), generator=torch.Generator())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_unchanged(name):
    theirs, _ = _run(SCRIPTS[name], "opacus")
    with installed():
        ours, _ = _run(SCRIPTS[name], "opacus")
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


# ---- processes


def _python(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_one_line_at_the_top_of_a_script():
    script = "import dpcore.as_opacus, opacus; from opacus import PrivacyEngine as E; print(E.__module__)"
    assert _python("-c", script)[:2] == (0, "dpcore.privacy_engine")


def test_opacus_that_was_imported_before_is_one_sentence():
    code, _, told = _python("-W", "ignore", "-c", "import opacus; import dpcore.as_opacus")
    assert code == 1
    assert f"ImportError: Opacus {opacus.__version__} was imported before dpcore.as_opacus" in told.splitlines()[-1]


def test_scripts_and_modules_and_what_they_start(tmp_path):
    child = "import opacus, importlib.metadata as m; print(opacus.PrivacyEngine.__module__, m.version('opacus'))"
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "script.py").write_text(
        textwrap.dedent(f"""
        import subprocess, sys
        import opacus, beside
        print(opacus.PrivacyEngine.__module__, __name__, beside.WORD, sys.argv[1:], flush=True)
        subprocess.run([sys.executable, "-c", {child!r}], check=True)
        """)
    )
    dpcores = "dpcore.privacy_engine"
    code, said, told = _python("-m", "dpcore.as_opacus", str(tmp_path / "script.py"), "--lr", "1")
    expected = [f"{dpcores} __main__ beside ['--lr', '1']", f"{dpcores} {VERSION}"]
    assert (code, said.splitlines()) == (0, expected), told
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    code, said, told = _python("-m", "dpcore.as_opacus", "-m", "script", "x", PYTHONPATH=paths)
    assert (code, said.splitlines()[0]) == (0, f"{dpcores} __main__ beside ['x']"), told


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--nothing"]])
def test_nothing_to_run(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m dpcore.as_opacus")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nosuch.py"], "no such file or directory; give the path"),
        (["folder"], "a folder without __main__"),
        (["broken.py"], "no Python"),
        (["bytes.py"], "no Python"),
        (["-m", "nosuch"], "no such module"),
        (["-m", "os.nosuch"], "no such module"),
        (["-m", "dpcore.rules"], "a package without __main__"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(arguments, why, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("broken.py").write_text("print(", encoding="utf-8")
    Path("bytes.py").write_bytes(b"\x7fELF\0")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{arguments[-1]} cannot be run: ") and why in said


def test_a_wrapper_has_no_method_of_pythons_that_its_class_has_not():
    """``len(model)`` would fail, where ``hasattr(model, "__len__")`` said that it does not."""
    wrapped = GradSampleModule(nn.Sequential(nn.Linear(3, 2)))
    assert not any(hasattr(wrapped, name) for name in ("__getitem__", "__len__", "__iter__"))


def test_a_path_for_what_starts_its_own_processes(capsys):
    assert main(["--path"]) == 0
    paths = os.pathsep.join([capsys.readouterr().out.strip(), str(ROOT)])
    script = (
        "from opacus.optimizers import optimizer; import opacus, inspect; inspect.getfile(opacus); "
        "print(opacus.__version__, optimizer.__spec__.origin)"
    )
    assert _python("-c", script, PYTHONPATH=paths)[:2] == (0, f"{VERSION} dpcore")
