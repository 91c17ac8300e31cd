//! Which classes are taken for which, and samples of held-out rows.

use super::evidence::{Confusion, Sample, Samples};
use super::picture::base64;
use super::tables::scrolling;
use super::text::{count, escaped, figure, percent, shortened};

/// The most characters of a class's name in a table.
const NAME_CHARS_MAX: usize = 16;
/// The most classes and pairs in lists.
const LIST_MAX: usize = 30;

/// A class's name, cut where it is long, with the whole of it to be seen by pointing at it.
fn named(name: &str) -> String {
    let short = shortened(name, NAME_CHARS_MAX);
    if short == name { escaped(name) } else { format!("<span title=\"{}\">{}</span>", escaped(name), escaped(&short)) }
}

fn part(of: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| of as f64 / whole as f64)
}

/// `96.7`, for a column of them.
fn hundredths(part: Option<f64>) -> String {
    part.map_or_else(|| "–".to_string(), |part| format!("{:.1}", part * 100.0))
}

/// The table of all classes, or lists of the worst.
pub(super) fn confusion(confusion: &Confusion) -> String {
    let (rows, right) = (
        confusion.rows.iter().sum::<u64>(),
        confusion.right.iter().fold(0u64, |sum, right| sum.saturating_add(*right)),
    );
    let title = format!(
        "<p class=\"note\">After step {}: {} of {} held-out rows are classified rightly, {}.</p>",
        count(confusion.step),
        count(right),
        count(rows),
        percent(part(right, rows))
    );
    match &confusion.counts {
        Some(counts) => title + &heat(confusion, counts),
        None => title + &lists(confusion),
    }
}

fn heat(confusion: &Confusion, counts: &[Vec<u64>]) -> String {
    let classes = 0..counts.len();
    let names: Vec<String> = classes.clone().map(|class| named(&confusion.name(class))).collect();
    let columns: String = names.iter().map(|name| format!("<th scope=\"col\">{name}</th>")).collect();
    let cell = |truth: usize, predicted: usize| {
        let number = counts[truth][predicted];
        let share = part(number, confusion.rows[truth]).unwrap_or(0.0);
        // Few mistakes among many rows are to be seen too: the square root raises them.
        let (class, strength) = if truth == predicted { ("right", share) } else { ("wrong", share.sqrt()) };
        match number {
            0 => "<td class=\"zero\">·</td>".to_string(),
            _ => format!("<td class=\"{class}\" style=\"--v:{strength:.3}\">{}</td>", count(number)),
        }
    };
    let row = |truth: usize| {
        let cells: String = classes.clone().map(|predicted| cell(truth, predicted)).collect();
        let recall = hundredths(part(confusion.right[truth], confusion.rows[truth]));
        format!("<tr><th scope=\"row\">{}</th>{cells}<td class=\"sum\">{recall}</td></tr>", names[truth])
    };
    let rows: String = classes.clone().map(row).collect();
    let precision = |class: usize| {
        format!("<td class=\"sum\">{}</td>", hundredths(part(confusion.right[class], confusion.predicted[class])))
    };
    let precisions: String = classes.map(precision).collect();
    let table = format!(
        "<table class=\"heat\"><thead><tr><th scope=\"col\">class</th>{columns}\
         <th scope=\"col\" class=\"sum\">recall, %</th></tr></thead><tbody>{rows}</tbody><tfoot><tr><th scope=\"row\">precision, %</th>{precisions}\
         <td></td></tr></tfoot></table>"
    );
    // Outside of the table, which may be wider than the screen.
    let about = "A row is a class, a column what its rows are taken for. Recall: the part of a class that is found. Precision: the part of what is \
                 taken for a class that is of it.";
    scrolling("Which classes are taken for which", &table) + &format!("<p class=\"note\">{about}</p>")
}

fn lists(confusion: &Confusion) -> String {
    let mut classes: Vec<usize> = (0..confusion.rows.len()).filter(|&class| confusion.rows[class] > 0).collect();
    let recall = |class: usize| part(confusion.right[class], confusion.rows[class]).unwrap_or(1.0);
    classes.sort_by(|&a, &b| recall(a).total_cmp(&recall(b)).then(confusion.rows[b].cmp(&confusion.rows[a])));
    let row = |&class: &usize| {
        let (rows, right) = (confusion.rows[class], confusion.right[class]);
        format!(
            "<tr><th scope=\"row\">{}</th><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            named(&confusion.name(class)),
            count(rows),
            count(right),
            percent(part(right, rows))
        )
    };
    let worst: String = classes.iter().take(LIST_MAX).map(row).collect();
    let table = format!(
        "<table><thead><tr><th scope=\"col\">class</th><th scope=\"col\" class=\"n\">rows</th><th scope=\"col\" class=\"n\">right</th>\
         <th scope=\"col\" class=\"n\">recall</th></tr></thead><tbody>{worst}</tbody></table>"
    );
    let mut html = format!(
        "<h3>The classes with the lowest recall, of {}</h3>{}",
        count(confusion.rows.len() as u64),
        scrolling("Recall by class", &table)
    );
    let Some(mistakes) = &confusion.mistakes else {
        return html + "<p class=\"note\">Of so many classes it is not counted which is taken for which.</p>";
    };
    let pair = |[truth, predicted, times]: &[u64; 3]| {
        let name = |class: u64| named(&confusion.name(class as usize));
        format!(
            "<tr><th scope=\"row\">{}</th><td>{}</td><td class=\"n\">{}</td></tr>",
            name(*truth),
            name(*predicted),
            count(*times)
        )
    };
    let pairs: String = mistakes.iter().take(LIST_MAX).map(pair).collect();
    let table = format!(
        "<table><thead><tr><th scope=\"col\">class</th><th scope=\"col\">taken for</th><th scope=\"col\" class=\"n\">rows</th></tr></thead>\
         <tbody>{pairs}</tbody></table>"
    );
    html += &format!("<h3>The most frequent mistakes</h3>{}", scrolling("The most frequent mistakes", &table));
    html
}

/// Rows and what the model says of them: as pictures if they are some, else a table of features.
pub(super) fn samples(samples: &Samples) -> String {
    let wrong = samples.samples.iter().filter(|sample| !sample.is_right).count();
    let sorts = match (wrong, samples.samples.len() - wrong) {
        (0, _) => "none of them is wrong".to_string(),
        (wrong, 0) => format!("{wrong} that are classified wrongly"),
        (wrong, right) => format!("{wrong} that are classified wrongly, then {right} that are right"),
    };
    let title = format!("<p class=\"note\">Held-out rows after step {}: {sorts}.</p>", count(samples.step));
    if samples.samples.iter().all(|sample| sample.picture.is_some()) {
        return format!(
            "{title}<ul class=\"samples\">{}</ul>",
            samples.samples.iter().map(pictured).collect::<String>()
        );
    }
    title + &scrolling("Samples", &features(samples))
}

fn pictured(sample: &Sample) -> String {
    let Some(picture) = &sample.picture else { return String::new() };
    let (truth, predicted) = (escaped(&sample.truth), escaped(&sample.predicted));
    let source = base64(&picture.png());
    let sure =
        sample.confidence.map_or(String::new(), |part| format!("<small>{:.0}\u{a0}% sure</small>", part * 100.0));
    let (class, said) = if sample.is_right {
        ("right", format!("<b>{}</b> <small>right</small>{sure}", named(&sample.truth)))
    } else {
        (
            "wrong",
            format!(
                "<b>{}</b> <small>taken for</small> <b>{}</b>{sure}",
                named(&sample.truth),
                named(&sample.predicted)
            ),
        )
    };
    format!(
        "<li class=\"{class}\"><img src=\"data:image/png;base64,{source}\" width=\"{}\" height=\"{}\" alt=\"Row {}: class {truth}, taken for {predicted}\">\
         <span>{said}</span></li>",
        picture.width, picture.height, sample.row
    )
}

fn features(samples: &Samples) -> String {
    let shown = samples.samples.iter().map(|sample| sample.values.len()).max().unwrap_or(0);
    let column = |index: usize| samples.columns.get(index).map_or_else(|| index.to_string(), |name| named(name));
    let columns: String =
        (0..shown).map(|index| format!("<th scope=\"col\" class=\"n\">{}</th>", column(index))).collect();
    let row = |sample: &Sample| {
        let value = |value: &Option<f32>| format!("<td class=\"n\">{}</td>", figure(value.map(f64::from)));
        let values: String = sample.values.iter().map(value).collect();
        let class = if sample.is_right { "right" } else { "wrong" };
        format!(
            "<tr class=\"{class}\"><th scope=\"row\" class=\"n\">{}</th><td>{}</td><td>{}</td><td class=\"n\">{}</td>{values}</tr>",
            count(sample.row),
            named(&sample.truth),
            named(&sample.predicted),
            percent(sample.confidence.map(f64::from))
        )
    };
    let rows: String = samples.samples.iter().map(row).collect();
    let more = samples.features.saturating_sub(shown);
    let more =
        if more > 0 { format!("<caption>And {} more features.</caption>", count(more as u64)) } else { String::new() };
    format!(
        "<table class=\"rows\">{more}<thead><tr><th scope=\"col\" class=\"n\">row</th><th scope=\"col\">class</th><th scope=\"col\">taken for</th>\
         <th scope=\"col\" class=\"n\">sure</th>{columns}</tr></thead><tbody>{rows}</tbody></table>"
    )
}
