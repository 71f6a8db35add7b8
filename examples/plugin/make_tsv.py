"""Write signs.tsv, the data of run.yaml, from the signs that `retouch data synth --out signs` generated."""

from pathlib import Path

lines = ["image\tmask\tcaption\ttext"]
for line in Path("signs/self_bench.txt").read_text(encoding="utf-8").splitlines():
    number, text = line.split("-", 1)
    place = f"signs/test{number}"
    lines.append(f"{place}_source.png\t{place}_mask.png\tA sign with the text '{text}'.\t{text}")
Path("signs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
