"""The comparison of `mhfast bench`, from a checkout: python -m benchmarks.report --help."""

from mhfast._bench import main

if __name__ == "__main__":
    raise SystemExit(main())
