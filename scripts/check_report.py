"""Opens a report in a headless Chromium and checks it. Run by hand: CI need not have a browser.

    pip install playwright                      # its own browsers are not needed
    python scripts/check_report.py report.html --browser /usr/bin/chromium --shots shots

Checks: no console message, no request but for the file itself, every figure has marks of a size above nothing and with
numbers, texts lie inside their figures, nothing is wider than the page at 390 pixels, hovering and arrow keys show
numbers, the attention map is drawn and changes with the head, figures can be saved as pictures, a legend brings out its
series, dark mode is dark, and printing gives a PDF. Screenshots go to the folder --shots; with --png all figures are written there as PNG files.
"""

import argparse
import pathlib
import sys

from playwright.sync_api import sync_playwright

FIGURES = """() => Array.from(document.querySelectorAll('svg.fig')).map(svg => {
  const box = svg.getBoundingClientRect();
  const marks = Array.from(svg.querySelectorAll('.m')).filter(m => { const r = m.getBoundingClientRect(); return r.width > 0 && r.height > 0; });
  const out = Array.from(svg.querySelectorAll('text,.m')).filter(t => {
    const r = t.getBoundingClientRect();
    return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1; }).map(t => t.textContent || t.tagName);
  return {id: svg.id, shown: box.width > 0, marks: marks.length, out, label: svg.getAttribute('aria-label'), small: box.width > 0 ? 11 * box.width / svg.viewBox.baseVal.width : 11};
})"""
WIDE = """() => {
  const wide = [];
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('svg') || e.closest('.scroll') || e.closest('figure') || e.closest('.skip')) continue;
    const r = e.getBoundingClientRect();
    if (r.width > 0 && (r.right > innerWidth + 1 || r.left < -1)) wide.push(e.tagName + '.' + e.className + ' ' + Math.round(r.right));
  }
  return {wide, scroll: document.documentElement.scrollWidth, inner: innerWidth};
}"""
COLORS = """() => {
  const map = document.getElementById('map'), copy = document.createElement('canvas');
  copy.width = map.width; copy.height = map.height;
  const g = copy.getContext('2d', {willReadFrequently: true});
  g.drawImage(map, 0, 0);
  return new Set(g.getImageData(0, 0, map.width, map.height).data).size;
}"""
PIXELS = "() => document.getElementById('map').toDataURL()"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--shots", type=pathlib.Path)
    parser.add_argument("--png", action="store_true")
    args = parser.parse_args()
    problems, said = [], []
    address = args.report.resolve().as_uri()
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)

    def shot(page, name, **more):
        if args.shots:
            page.screenshot(path=str(args.shots / (name + ".png")), **more)

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=args.browser, args=["--no-sandbox", "--disable-gpu"])
        print("browser", browser.version)

        def open_page(**options):
            page = browser.new_context(**options).new_page()
            page.on("console", lambda m: problems.append(f"console: {m.type}: {m.text}"))
            page.on("pageerror", lambda e: problems.append(f"error: {e}"))
            page.on("request", lambda r: None if r.url == address or r.url.startswith("data:") else problems.append(f"request: {r.url}"))
            page.goto(address)
            return page

        page = open_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1)
        figures = page.evaluate(FIGURES)
        said.append(f"{len(figures)} figures, {sum(f['marks'] for f in figures)} marks")
        for f in figures:
            if f["shown"] and f["marks"] == 0:
                problems.append(f"{f['id']} has no marks")
            if f["out"]:
                problems.append(f"{f['id']}: outside of the figure: {f['out'][:4]}")
            if not f["label"]:
                problems.append(f"{f['id']} has no label")
        if not figures:
            problems.append("no figures")
        shot(page, "desktop", full_page=True)
        shot(page, "top")

        # Numbers by hovering and by keyboard.
        mark = page.locator("svg.fig .m").first
        mark.scroll_into_view_if_needed()
        mark.hover()
        tip = page.locator("#tip")
        if not tip.is_visible() or not tip.inner_text().strip():
            problems.append("hovering shows nothing")
        said.append("hover: " + tip.inner_text().replace("\n", " | "))
        shot(page, "hover")
        svg = page.locator("svg.fig").first
        svg.focus()
        page.keyboard.press("ArrowRight")
        first = tip.inner_text()
        page.keyboard.press("ArrowDown")
        if not first or tip.inner_text() == first:
            problems.append("arrow keys do not move over the marks")
        page.keyboard.press("Escape")
        legend = page.locator("svg.fig .lg").first
        if legend.count():
            legend.focus()
            page.keyboard.press("Enter")
            if page.locator("svg.one .sr.on").count() != 1:
                problems.append("a legend does not bring out its series")
            page.keyboard.press("Enter")

        # The attention maps.
        if page.locator("#map").count():
            said.append(f"attention map: {page.evaluate(COLORS)} byte values")
            if page.evaluate(COLORS) < 16:
                problems.append("the attention map is empty")
            before = page.evaluate(PIXELS)
            page.select_option("#map-layer", index=min(5, page.locator("#map-layer option").count() - 1))
            if page.locator("#map-layer option").count() > 1 and page.evaluate(PIXELS) == before:
                problems.append("the attention map does not change with the layer")
            page.locator("#map").focus()
            for key in ["ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"]:
                page.keyboard.press(key)
            if "% of the attention" not in page.locator("#map-text").inner_text():
                problems.append("arrow keys on the map show no numbers")
            said.append(page.locator("#map-text").inner_text())
            page.locator("#map").scroll_into_view_if_needed()
            shot(page, "map")
            cell = page.locator("svg.fig .m[data-layer='1']").first
            if cell.count():
                cell.click()
                if page.input_value("#map-layer") != "1":
                    problems.append("a click on a KV head does not show its attention")
        # Pictures.
        for selector in ["figure .save", ".controls .save"]:
            saves = page.locator(selector)
            for i in {0, saves.count() - 1} if saves.count() else set():
                if saves.nth(i).is_visible():
                    with page.expect_download() as download:
                        saves.nth(i).dispatch_event("click")
                    data = pathlib.Path(download.value.path()).read_bytes()
                    if not data.startswith(b"\x89PNG") or len(data) < 4000:
                        problems.append(f"{download.value.suggested_filename} is no picture: {len(data)} bytes")
                    said.append(f"{download.value.suggested_filename}: {len(data)} bytes")
                    if args.shots:
                        (args.shots / download.value.suggested_filename).write_bytes(data)
        choice = page.locator(".choices select")
        if choice.count():
            choice.first.select_option(index=choice.first.locator("option").count() - 1)
            if page.locator(".choices").first.locator(".choice:not(.off)").count() != 2:
                problems.append("choosing a needle grid does not show two")
        if args.png and args.shots:
            for f in page.locator("svg.fig").all():
                if f.is_visible():
                    f.screenshot(path=str(args.shots / (f.get_attribute("id") + ".png")))
        page.emulate_media(media="print")
        page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
        pdf = page.pdf(format="A4", print_background=True)
        if not pdf.startswith(b"%PDF") or len(pdf) < 20000:
            problems.append(f"printing gives {len(pdf)} bytes")
        said.append(f"PDF of {len(pdf)} bytes")
        if args.shots:
            (args.shots / "print.pdf").write_bytes(pdf)
        page.context.close()

        for name, options in {"phone": {"color_scheme": "light"}, "phone-dark": {"color_scheme": "dark"}}.items():
            page = open_page(viewport={"width": 390, "height": 844}, device_scale_factor=2, has_touch=True, is_mobile=True, **options)
            w = page.evaluate(WIDE)
            if w["wide"] or w["scroll"] > w["inner"]:
                problems.append(f"{name}: wider than the page: {w}")
            for f in page.evaluate(FIGURES):
                if f["shown"] and f["small"] < 9:
                    problems.append(f"{name}: {f['id']} has texts of {f['small']:.1f} pixels")
            ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
            if ("255" in ground) != (options["color_scheme"] == "light"):
                problems.append(f"{name}: the ground is {ground}")
            if name == "phone":
                page.locator("svg.fig .m").first.tap()
                if not page.locator("#tip").is_visible():
                    problems.append("tapping shows nothing")
            shot(page, name, full_page=name == "phone")
            page.context.close()
        page = open_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
        shot(page, "dark", full_page=True)
        browser.close()
    for s in said:
        print(s)
    for problem in problems:
        print("PROBLEM", problem)
    print("ok" if not problems else f"{len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
