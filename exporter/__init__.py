"""Turns target models and drafters into bundles.

    from pathlib import Path
    from dspark.exporter.export import export_bundle, prepare

    export_bundle(prepare(Path("Qwen3-4B"), Path("dspark_qwen3_4b_block7"), Path("bundle")))

Nothing is written before ``prepare`` has accepted both checkpoints.
"""
