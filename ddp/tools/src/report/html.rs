//! Text, numbers and tables as HTML.

use crate::shown::is_unseen;
pub(super) use crate::units::{count, duration, grouped, plural};

/// Escapes a text for HTML content and quoted attributes. Invisible characters become U+FFFD.
pub(super) fn escaped(text: &str) -> String {
    let mut html = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match character {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            '\n' | '\t' => html.push(character),
            other if is_unseen(other) => html.push('\u{fffd}'),
            other => html.push(other),
        }
    }
    html
}

/// The most characters of a word that a line break does not divide.
const WORD_CHARS_MAX: usize = 16;

/// A text escaped for a narrow cell: lines break after signs, as in paths and lists of settings,
/// and in words only where these are very long.
pub(super) fn breakable(text: &str) -> String {
    let (mut html, mut since) = (String::new(), 0);
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        html += &escaped(character.encode_utf8(&mut [0; 4]));
        since = if character.is_whitespace() {
            0
        } else {
            since + 1
        };
        let Some(next) = characters.peek() else {
            break;
        };
        let may_end = ",=:/_-".contains(character) && !next.is_ascii_digit();
        if !next.is_whitespace() && (since == WORD_CHARS_MAX || may_end) {
            html += "<wbr>";
            since = 0;
        }
    }
    html
}

/// The first characters of a text, with an ellipsis where it is cut.
pub(super) fn shortened(text: &str, chars_max: usize) -> String {
    if text.chars().count() <= chars_max {
        return text.to_string();
    }
    let start = text.chars().take(chars_max.saturating_sub(1));
    start.chain(['…']).collect()
}

/// The parts that are not empty, with commas between.
pub(crate) fn joined(parts: &[&str]) -> String {
    let parts = parts.iter().filter(|part| !part.is_empty());
    parts.copied().collect::<Vec<_>>().join(", ")
}

/// Four significant digits: `0.9280`, `11,604`, `2.310`, `1.234e-7`; a dash if missing or not
/// finite.
pub(crate) fn figure(value: Option<f64>) -> String {
    let Some(value) = value.filter(|value| value.is_finite()) else {
        return "–".to_string();
    };
    let size = value.abs();
    let text = match size {
        0.0 => return "0".to_string(),
        _ if !(1e-4..1e15).contains(&size) => return format!("{value:.3e}"),
        _ if size >= 1000.0 => grouped(&format!("{size:.0}")),
        _ => {
            let decimals = (3 - size.log10().floor() as i32).clamp(0, 9) as usize;
            format!("{size:.decimals$}")
        }
    };
    let sign = if value < 0.0 { "−" } else { "" };
    format!("{sign}{text}")
}

/// A fraction as `97.35 %`.
pub(super) fn percent(part: Option<f64>) -> String {
    match part.filter(|part| part.is_finite()) {
        Some(part) => format!("{:.2} %", part * 100.0),
        None => "–".to_string(),
    }
}

/// A table. Headings are texts, cells HTML; the first of each row is its heading. Columns from
/// `texts` on hold numbers and are aligned right. On a narrow screen each row of a wide table is a
/// block of cells with their headings.
pub(super) fn table(
    label: &str,
    headings: &[&str],
    texts: usize,
    rows: impl Iterator<Item = Vec<String>>,
) -> String {
    let class = |column: usize| if column >= texts { " class=\"n\"" } else { "" };
    let headings: Vec<String> = headings.iter().map(|heading| escaped(heading)).collect();
    let head = |(column, heading): (usize, &String)| {
        format!("<th scope=\"col\"{}>{heading}</th>", class(column))
    };
    let mut head: String = headings.iter().enumerate().map(head).collect();
    if !head.is_empty() {
        head = format!("<thead><tr>{head}</tr></thead>");
    }
    let cell = |(column, cell): (usize, String)| {
        let heading = headings.get(column);
        let heading = heading.map_or(String::new(), |heading| format!(" data-h=\"{heading}\""));
        let class = class(column);
        match column {
            0 => format!("<th scope=\"row\"{class}{heading}>{cell}</th>"),
            _ => format!("<td{class}{heading}>{cell}</td>"),
        }
    };
    let row = |row: Vec<String>| {
        let cells: String = row.into_iter().enumerate().map(cell).collect();
        format!("<tr>{cells}</tr>")
    };
    let rows: String = rows.map(row).collect();
    let stacked = if headings.len() > 3 {
        " class=\"stack\""
    } else {
        ""
    };
    let table = format!("<table{stacked}>{head}<tbody>{rows}</tbody></table>");
    scrolling(label, &table)
}

/// A box that scrolls sideways where the screen is too narrow for its content.
pub(super) fn scrolling(label: &str, content: &str) -> String {
    format!(
        "<div class=\"scroll\" role=\"region\" aria-label=\"{label}\" tabindex=\"0\">{content}</div>"
    )
}

/// A remark in small letters; `text` is HTML.
pub(super) fn note(text: &str) -> String {
    format!("<p class=\"note\">{text}</p>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_cannot_end_its_element() {
        assert_eq!(
            escaped("<script>\"'&\u{202e}\u{7}"),
            "&lt;script&gt;&quot;&#39;&amp;\u{fffd}\u{fffd}"
        );
    }

    #[test]
    fn lines_break_after_signs_and_in_very_long_words() {
        let text = breakable("rows=1,036,lr=a/b <classification>");
        assert_eq!(
            text,
            "rows=1,036,<wbr>lr=<wbr>a/<wbr>b &lt;classification&gt;"
        );
        assert_eq!(breakable(&"a".repeat(40)).matches("<wbr>").count(), 2);
    }

    #[test]
    fn numbers_have_the_digits_that_count() {
        let figures = [
            (0.928_040_6, "0.9280"),
            (11_604.4, "11,604"),
            (2.3101, "2.310"),
            (999.96, "1000.0"),
            (1.2343e-7, "1.234e-7"),
            (-3.5, "−3.500"),
            (0.0, "0"),
            (1234.0, "1,234"),
        ];
        for (value, text) in figures {
            assert_eq!(figure(Some(value)), text, "{value}");
        }
        assert_eq!(
            (figure(None), figure(Some(f64::NAN))),
            ("–".to_string(), "–".to_string())
        );
    }
}
