//! How the ten digits are written: strokes through points, several styles each, from `strokes.txt`.

use std::sync::LazyLock;

/// One movement of the pen.
pub(super) struct Stroke {
    /// Whether the pen follows a smooth curve through the points, or straight lines between them.
    pub(super) smooth: bool,
    /// (x, y) around the middle of the digit, y downwards.
    pub(super) points: Vec<[f32; 2]>,
}

/// The strokes of one way to write a digit.
pub(super) type Style = Vec<Stroke>;

/// The styles of every digit.
pub(super) static DIGITS: LazyLock<[Vec<Style>; 10]> =
    LazyLock::new(|| parse(include_str!("strokes.txt")));

fn parse(text: &str) -> [Vec<Style>; 10] {
    let mut digits: [Vec<Style>; 10] = Default::default();
    let mut last_style = "";
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let mut word = || words.next().expect("digit, style, kind, points");
        let (digit, style, kind) = (word(), word(), word());
        let styles = &mut digits[digit.parse::<usize>().expect("a digit")];
        if styles.is_empty() || style != last_style {
            styles.push(Style::new());
            last_style = style;
        }
        let number = |text: &str| text.parse::<f32>().expect("a coordinate");
        let point = |word: &str| {
            let (x, y) = word.split_once(',').expect("x,y");
            [number(x), number(y)]
        };
        let (smooth, points) = (kind == "curve", words.map(point).collect());
        let style = styles.last_mut().expect("pushed above");
        style.push(Stroke { smooth, points });
    }
    digits
}
