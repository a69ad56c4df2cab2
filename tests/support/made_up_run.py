"""A run of the benchmarks that never was: plausible numbers under the keys of ``bench/conftest.py``."""

SHAPES = {
    "gpt": {"parameters": 26_535_168, "tensors": 52},
    "resnet20": {"parameters": 272_474, "tensors": 65},
    "small": {"parameters": 320_000, "tensors": 5000},
}


def entry(bench: str, contender: str, seconds: float, **info: object) -> dict[str, object]:
    return {
        "name": f"test_{contender}",
        "fullname": f"bench/bench_{bench}.py::test_{contender}",
        "stats": {"median": seconds, "rounds": 20},
        "extra_info": {"bench": bench, "contender": contender, "threads": 2, "device": "cpu", **info},
    }


def ratio(name: str, value: float) -> dict[str, object]:
    return {"ratio_name": name, name: value, "ratio": value, "ratio_low": value * 0.96, "ratio_high": value * 1.05}


def pass_entries() -> list[dict[str, object]]:
    cases = (("norm", "norm", 4, 0.97), ("perturb", "perturb", 16, 0.88), ("perturb", "restore", 8, 0.95))
    cases += (("step", "step", 24, 0.91), ("step", "refresh_step", 32, 0.79))
    found = []
    for bench, name, size, share in cases:
        shared = {
            "model": "gpt",
            **SHAPES["gpt"],
            "pass": name,
            "bytes_per_parameter": size,
            "gigabytes_per_second": 17.3 * share,
        }
        seconds = size * 26.5e6 / 17.3e9
        found.append(entry(bench, "sassha cpu", seconds / share, **shared, **ratio("share_of_roofline", share)))
        found.append(entry(bench, "roofline", seconds, **shared))
    return found


def step_entries() -> list[dict[str, object]]:
    times = {"sassha cpu": 2.04, "adamw fused": 1, "adamw foreach": 3.1, "adamw for-loop": 2.9, "eager loop": 19.3}
    times |= {"sassha foreach": 9.7, "sam": 5.2, "adahessian": 1.13, "sophia-h": 1.12, "shampoo": 164.0}
    found = []
    for model, unit, scale in (("gpt", 0.0431, 1.0), ("resnet20", 0.00031, 0.6), ("small", 0.0136, 0.27)):
        for name, relative in times.items():
            value = relative if name == "adamw fused" else relative * scale
            calls = "three calls" if "sassha" in name or "eager" in name else "step"
            info = {**ratio("ratio_to_fused_adamw", value), "speedup_over_eager": 19.3 * scale / value}
            if name == "sassha cpu":
                info["target"] = 1.2
            found.append(entry("step", name, unit * value, model=model, calls=calls, **SHAPES[model], **info))
    return found


def train_entries() -> list[dict[str, object]]:
    costs = {"sam": (2.02, 2.02), "sassha exact": (2.0, 4.31), "sassha finite difference": (2.0, 3.04)}
    costs |= {"g-sassha exact": (2.03, 4.4), "m-sassha exact": (1.05, 3.5), "m-sassha finite difference": (1.05, 2.1)}
    costs |= {"adahessian": (3.96, 3.96), "sophia-h": (1.02, 3.6), "shampoo": (1.03, 1.03), "eager loop": (2.2, 4.6)}
    found = []
    for model, unit in (("resnet20", 0.161), ("gpt", 0.402)):
        for name, (ordinary, refresh) in costs.items():
            gc = (9 * ordinary + refresh) / 10
            spread = {"gc_low": gc * 0.97, "gc_high": gc * 1.04, "gc_ordinary": ordinary, "gc_refresh": refresh}
            memory = {"mib_ordinary": 201.7 * unit * 6, "mib_refresh": 110.3 * unit * 6 * refresh}
            more = {"target": 2.35} if name == "sassha exact" else {}
            found.append(entry("train", name, gc * unit, model=model, gc=gc, **spread, **memory, **more))
        for name, gc in (("exact", 2.3), ("finite difference", 1.04), ("central difference", 2.06)):
            info = {"gc": gc, "gc_low": gc * 0.93, "gc_high": gc * 1.06, "gc_ordinary": 2.0, "gc_refresh": 2.0 + gc}
            found.append(entry("hvp", name, gc * unit, model=model, **info))
    return found


def scaling_entries() -> list[dict[str, object]]:
    series = {("sassha cpu", "three calls"): (11.0, 1.9, 1800.0), ("adamw fused", "step"): (9.0, 0.95, 3900.0)}
    series[("sassha cpu", "step op")] = (4.0, 0.9, 700.0)
    found = []
    for (name, calls), (fixed, each, tensor) in series.items():
        for threads in (1, 2):
            line = {"fit_intercept_us": fixed, "fit_slope_ns": each / threads, "fit_r2": 0.9987}
            for size in (10**4, 10**5, 10**6, 10**7, 10**8):
                seconds = fixed * 1e-6 + each * 1e-9 * size / threads
                info = {"axis": "parameters", "calls": calls, "parameters": size, "tensors": 10, **line}
                found.append(entry("scaling", name, seconds, **{**info, "threads": threads}))
            line |= {"fit_slope_ns": tensor}
            for count in (1, 10, 100, 1000, 10000):
                seconds = fixed * 1e-6 + tensor * 1e-9 * count
                info = {"axis": "tensors", "calls": calls, "parameters": 64 * count, "tensors": count, **line}
                if name == "sassha cpu":
                    info["target"] = {"three calls": 3.0, "step op": 1.0}[calls]
                found.append(entry("scaling", name, seconds, **{**info, "threads": threads}))
            info = {"axis": "threads", "calls": calls, "model": "gpt", **SHAPES["gpt"], "threads": threads}
            info |= ratio("speedup_over_one_thread", 0.97 * threads)
            found.append(entry("scaling", name, 0.02 / threads, **info))
    return found


def made_up() -> dict[str, object]:
    cpu = {"brand_raw": "Made-up <CPU> & Co", "count": 2}
    return {
        "machine_info": {"cpu": cpu, "python_version": "3.11.7", "system": "Linux", "release": "6.1"},
        "commit_info": {"id": "0123456789abcdef", "dirty": False},
        "datetime": "2026-03-01T12:00:00+00:00",
        "benchmarks": [*pass_entries(), *step_entries(), *train_entries(), *scaling_entries()],
    }
