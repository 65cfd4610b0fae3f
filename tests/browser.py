"""A real JupyterLab in headless Chromium, driven by selenium: what ``test_browser.py`` needs of both."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
SCREENSHOTS = ROOT / "tests" / "screenshots"
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --window-size=1250,2600"""
NO_NEWS = {"fetchNews": "false", "checkForUpdates": False}


@contextmanager
def jupyterlab(folder, home):
    """The address of a JupyterLab over ``folder``, with its settings and runs in ``home``; its kernels import this
    checkout."""
    settings = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(NO_NEWS))
    places = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTERLAB_SETTINGS_DIR": "settings",
              "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "GRPO_LAB_RUNS": "runs"}  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k not in ("MPLBACKEND", "GRPO_LAB_HEADLESS")}
    environment |= {name: str(home / place) for name, place in places.items()} | {"PYTHONPATH": str(ROOT)}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = f"--no-browser --allow-root --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0"
    options += " --IdentityProvider.token= --LabApp.expose_app_in_browser=True --LabApp.extension_manager=readonly"
    command = [sys.executable, "-m", "jupyterlab", *options.split(), f"--ServerApp.root_dir={folder}"]
    with (home / "log.txt").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/lab"
    finally:
        server.terminate()  # it ends its kernels
        server.wait(30)


class Lab:
    """A browser with JupyterLab in it, one notebook open at a time."""

    def __init__(self, address, profile):
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_script_timeout(300)
        self.name = None
        port = int(address.split(":")[2].split("/")[0])
        self.until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "JupyterLab answers", 60)
        self.driver.get(address)
        self.until(lambda: self.driver.execute_script("return !!window.jupyterapp"), "JupyterLab has started", 60)
        self.do("await app.restored")
        self.do("await app.commands.execute('application:toggle-left-area')")

    def do(self, script, *args):
        """Run JavaScript with ``await``, ``args``, ``app`` (JupyterLab) and ``panel`` (the notebook in front)."""
        whole = """const args = [...arguments], done = args.pop(), app = window.jupyterapp;
            const panel = app.shell.currentWidget;
            (async () => {%s})().then(x => done([x === undefined ? null : x]), e => done(String(e)));"""
        found = self.driver.execute_async_script(whole % script, *args)
        if isinstance(found, str):
            raise RuntimeError(f"{found} in {script}")
        return found[0]

    def until(self, condition, what, seconds=20):
        return WebDriverWait(self.driver, seconds, 0.1).until(lambda _: condition(), f"not within {seconds} s: {what}")

    def open(self, name):
        """Show the notebook with this file name, all of its cells rendered; one that is open stays as it is."""
        if self.name == name:
            return
        if self.name is not None:
            self.do("await panel.sessionContext.shutdown(); panel.dispose()")
        self.name = name
        opened = """const p = await app.commands.execute('docmanager:open', {path: args[0]});
            await p.context.ready; await p.sessionContext.ready; app.shell.activateById(p.id);"""
        self.do(opened, name)
        shown = "return panel.context?.path === args[0] && panel.isVisible"
        self.until(lambda: self.do(shown, name), f"{name} is open")
        cells = """const s = panel.node.querySelector('.jp-WindowedPanel-outer'); s.scrollTop = s.scrollHeight;
            return panel.node.querySelectorAll('.jp-Notebook .jp-Cell').length === panel.content.widgets.length"""
        self.until(lambda: self.do(cells), "all cells are rendered")

    def run_all(self):
        """Run all cells; what the code cells' outputs are then, as (execution count, outputs)."""
        self.do("await app.commands.execute('notebook:run-all-cells')")
        return self.code_cells()

    def keys(self, *keys):
        """Press these keys, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self):
        """What a screen reader would say of where the focus is: role and name, or the name of its field."""
        return self.do("""const e = document.activeElement, field = e.closest('.widget-inline-hbox');
            const name = e.ariaLabel || field?.querySelector('label').textContent || e.textContent;
            return [e.getAttribute('role') ?? e.tagName, name]""")

    def tab_to(self, role, name):
        """Press Tab until the focus is there; a slider's number takes the focus too."""
        self.until(lambda: self.keys(Keys.TAB) or self.focused() == [role, name], f"Tab reaches {name}", 10)

    def text(self, selector):
        """What stands in the last such element of the notebook, as it is shown; "" where there is none."""
        return self.do("return [...panel.node.querySelectorAll(args[0])].at(-1)?.innerText ?? ''", selector)

    def start_cell(self, source):
        """Append a cell, and run it without waiting for its end."""
        start = """const n = panel.content, cell = {cell_type: 'code', source: args[0]};
            n.model.sharedModel.insertCell(n.widgets.length, cell); n.activeCellIndex = n.widgets.length - 1;
            app.commands.execute('notebook:run-cell'); n.activeCell.node.scrollIntoView()"""
        self.do(start, source)

    def code_cells(self):
        return self.do("""return panel.content.model.sharedModel.cells.filter(c => c.cell_type === 'code')
            .map(c => [c.execution_count, c.outputs])""")

    def theme(self, name):
        self.do("await app.commands.execute('apputils:change-theme', {theme: `JupyterLab ${args[0]}`})", name)
        dark = str(name == "Light").lower()
        self.until(lambda: self.do("return document.body.dataset.jpThemeLight === args[0]", dark), f"the theme {name}")

    def shoot(self, name):
        """Keep the notebook in screenshots, window by window."""
        total, window = self.do("""const s = panel.node.querySelector('.jp-WindowedPanel-outer');
            return [s.scrollHeight, s.clientHeight]""")
        scroll = """panel.node.querySelector('.jp-WindowedPanel-outer').scrollTop = args[0];
            await new Promise(requestAnimationFrame)"""
        for number, top in enumerate(range(0, total, window - 80)):
            self.do(scroll, top)
            self.picture(f"{name}_{number}")

    def picture(self, name):
        SCREENSHOTS.mkdir(exist_ok=True)
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "jpeg", "quality": 80})
        (SCREENSHOTS / f"{name}.jpg").write_bytes(b64decode(shot["data"]))

    def faults(self, seconds=10):
        """What a reader of the notebook in front could not read, however long he waits: [] where all is well."""
        end = time.monotonic() + seconds
        while (found := self.do(FAULTS)) and time.monotonic() < end:
            time.sleep(0.5)
        return found

    def contrasts(self, selector):
        """[ratio, text] of every visible piece of text below ``selector``, as WCAG 2 defines the ratio: 1 to 21."""
        return self.do(CONTRASTS, selector)


FAULTS = """
const found = [], root = panel.node;
const box = e => e.getBoundingClientRect();
for (const e of root.querySelectorAll('.jp-OutputArea-output')) {
    if (/Loading widget|Error displaying widget|Javascript Error/.test(e.textContent)) found.push(e.textContent.trim());
    if (e.dataset.mimeType === 'application/vnd.jupyter.stderr' && /Error|Warning/.test(e.textContent))
        found.push(e.textContent.trim());
    if (e.scrollWidth > e.clientWidth + 1 && !e.querySelector('table'))
        found.push(`wider than the page by ${e.scrollWidth - e.clientWidth}: ${e.dataset.mimeType}`);
}
for (const e of root.querySelectorAll('.jp-RenderedImage img'))
    if ((e.checkVisibility() || !e.closest('.jp-OutputArea').querySelector('.gl')) &&
        (!e.complete || e.naturalWidth < 100 || box(e).height < 50)) found.push('a picture does not show');
for (const e of root.querySelectorAll('.js-plotly-plot')) {
    const drawn = e.querySelectorAll('.trace, .bars .point').length;
    if (box(e).height < 100 || box(e).width < 300 || !drawn) found.push(`plotly: ${box(e).height}, ${drawn} traces`);
}
for (const e of root.querySelectorAll('.jp-OutputArea-output .jupyter-widgets'))
    if (!box(e).width || !box(e).height) found.push(`a widget without a size: ${e.className}`);
for (const e of root.querySelectorAll('.widget-label, .widget-readout, .widget-toggle-button'))
    if (e.scrollWidth > e.clientWidth) found.push(`cut off: ${e.textContent}`);
return found;
"""

CONTRASTS = r"""
const rgba = text => { const x = text.match(/[\d.]+/g).map(Number); return x.length < 4 ? [...x, 1] : x; };
const over = (top, below) => below.map((b, i) => top[i] * top[3] + b * (1 - top[3]));
const light = c => { const [r, g, b] = c.map(x => (x /= 255) <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
                     return .2126 * r + .7152 * g + .0722 * b; };
const background = e => {
    const behind = e.parentElement ? background(e.parentElement) : [255, 255, 255];
    return over(rgba(getComputedStyle(e).backgroundColor), behind);
};
const found = [];
for (const root of panel.node.querySelectorAll(args[0])) {
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node; node = walk.nextNode();) {
        const e = node.parentElement;
        if (!node.textContent.trim() || e.matches('style, .gl-mark, option') || !e.getClientRects().length) continue;
        const below = background(e), [a, b] = [light(over(rgba(getComputedStyle(e).color), below)), light(below)];
        found.push([(Math.max(a, b) + .05) / (Math.min(a, b) + .05), node.textContent.trim()]);
    }
}
return found;
"""
