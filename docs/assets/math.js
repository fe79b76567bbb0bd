// Typesets what Markdown marked as mathematics, with the KaTeX beside this file.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  const display = text.startsWith("\\[");
  katex.render(text.slice(2, -2), element, { displayMode: display, throwOnError: false });
}
