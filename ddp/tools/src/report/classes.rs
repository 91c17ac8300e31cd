//! The confusion matrix.

use super::html::{breakable, count, escaped, note, percent, scrolling, shortened, table};
use crate::confusion::{ClassScores, Confusion, largest_class};

/// The most characters of a class's name in a table.
const NAME_CHARS_MAX: usize = 16;
/// The most classes and mistakes that are listed.
const LIST_MAX: usize = 30;

/// A class's name; a long one is cut, and a tooltip shows all of it.
fn named(name: &str) -> String {
    let (short, name) = (shortened(name, NAME_CHARS_MAX), escaped(name));
    format!("<span title=\"{name}\">{}</span>", breakable(&short))
}

fn part(of: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| of as f64 / whole as f64)
}

/// The confusion matrix; with many classes, those with the lowest recall and the most frequent
/// mistakes.
pub(super) fn confusion(confusion: &Confusion) -> String {
    let rows = confusion.rows.iter().sum();
    let right = confusion.right.iter().sum();
    let largest = largest_class(&confusion.rows).map(|part| {
        let part = percent(Some(part));
        format!("; the largest class has {part} of the rows")
    });
    let tables = match &confusion.counts {
        Some(counts) => heat(confusion, counts),
        None => lists(confusion),
    };
    let (accuracy, largest) = (percent(part(right, rows)), largest.unwrap_or_default());
    let [step, right, rows] = [confusion.step, right, rows].map(count);
    note(&format!(
        "After step {step}: {right} of {rows} held-out rows are classified correctly, \
         {accuracy}{largest}."
    )) + &tables
}

fn heat(confusion: &Confusion, counts: &[Vec<u64>]) -> String {
    let name = |class: usize| named(&confusion.name(class));
    let scores = confusion.scores();
    let cell = |part: Option<f64>| match part {
        Some(1.0) => "<td class=\"sum\">100</td>".to_string(),
        Some(part) => format!("<td class=\"sum\">{:.1}</td>", part * 100.0),
        None => "<td class=\"sum\">–</td>".to_string(),
    };
    let (mut columns, mut rows) = (String::new(), String::new());
    for (class, counts) in counts.iter().enumerate() {
        columns += &format!("<th scope=\"col\">{}</th>", name(class));
        rows += &format!("<tr><th scope=\"row\">{}</th>", name(class));
        for (predicted, &number) in counts.iter().enumerate() {
            rows += &heat_cell(number, confusion.rows[class], class == predicted);
        }
        let [recall, f1] = [scores[class].recall, scores[class].f1].map(cell);
        rows += &format!("{recall}{f1}</tr>");
    }
    let precisions: String = scores.iter().map(|scores| cell(scores.precision)).collect();
    let table = format!(
        "<table class=\"heat\"><thead><tr><th scope=\"col\">class</th>{columns}\
         <th scope=\"col\" class=\"sum\">recall, %</th><th scope=\"col\" class=\"sum\">F1, %</th>\
         </tr></thead><tbody>{rows}</tbody><tfoot><tr><th scope=\"row\">precision, %</th>{precisions}\
         <td></td><td></td></tr></tfoot></table>"
    );
    let about = "Rows are true classes, columns are predictions. Recall: the share of a class that \
                 is predicted as that class. Precision: the share of the predictions of a class \
                 that is correct. F1: the harmonic mean of the two.";
    scrolling("Confusion matrix", &table) + &note(about)
}

fn heat_cell(number: u64, rows: u64, is_right: bool) -> String {
    let part = part(number, rows).unwrap_or(0.0);
    let (class, strength) = match (number, is_right) {
        (0, _) => return "<td class=\"zero\">·</td>".to_string(),
        (_, true) => ("right", part),
        // The square root makes a few mistakes among many rows visible.
        (_, false) => ("wrong", part.sqrt()),
    };
    let number = count(number);
    format!("<td class=\"{class}\" style=\"--v:{strength:.3}\">{number}</td>")
}

fn lists(confusion: &Confusion) -> String {
    let scores = confusion.scores();
    let mut classes: Vec<(usize, &ClassScores)> = scores.iter().enumerate().collect();
    classes.retain(|(_, scores)| scores.recall.is_some());
    classes.sort_by(|(a, of_a), (b, of_b)| {
        let by_recall = of_a.recall.partial_cmp(&of_b.recall).expect("finite");
        by_recall.then(confusion.rows[*b].cmp(&confusion.rows[*a]))
    });
    let row = |(class, scores): (usize, &ClassScores)| {
        let mut cells = vec![named(&confusion.name(class)), count(confusion.rows[class])];
        cells.extend([scores.recall, scores.precision, scores.f1].map(percent));
        cells
    };
    let worst = classes.into_iter().take(LIST_MAX).map(row);
    let headings = ["class", "rows", "recall", "precision", "F1"];
    let mut html = format!(
        "<h3>The classes with the lowest recall, of {}</h3>{}",
        count(confusion.rows.len() as u64),
        table("Recall by class", &headings, 1, worst)
    );
    if let Some(mistakes) = &confusion.mistakes {
        let row = |[truth, predicted, times]: &[u64; 3]| {
            let name = |class: u64| named(&confusion.name(class as usize));
            vec![name(*truth), name(*predicted), count(*times)]
        };
        let headings = ["class", "predicted as", "rows"];
        let title = "The most frequent mistakes";
        let rows = mistakes.iter().take(LIST_MAX).map(row);
        html += &format!("<h3>{title}</h3>{}", table(title, &headings, 2, rows));
    }
    html
}
