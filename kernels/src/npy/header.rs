//! The header of an `.npy` file: a Python dict literal with the keys `descr`, `fortran_order` and
//! `shape`. It is read as the JSON that it nearly is, and written with exactly numpy's bytes.
//! Nothing allocates by what a header claims; errors are sentences for `Error::BadFile`.

use serde::Deserialize;
use serde_json::Value;

use crate::shape::RANK_MAX;
use crate::{DType, Shape};

/// The start of every file; two bytes of version follow.
pub(super) const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// numpy pads headers so that elements start at a multiple of this.
const ALIGNMENT: usize = 64;
/// numpy leaves room for the first dimension to grow to this many digits.
const GROWTH_DIGITS: usize = 21;
/// How much of an invalid header an error quotes.
const SHOWN_BYTES_MAX: usize = 40;

/// Parses the header's text, the part after its length: the dtype, whether the first index varies
/// fastest, and the shape. `stored_as` gives the meaning of the dtype's text.
pub(super) fn parse<S>(
    text: &[u8],
    stored_as: impl Fn(&[u8]) -> Result<S, String>,
) -> Result<(S, bool, Shape), String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Header {
        descr: Value,
        fortran_order: bool,
        shape: Vec<usize>,
    }
    let json = as_json(&String::from_utf8_lossy(text));
    let header = serde_json::from_str::<Header>(&json).map_err(|error| {
        let got = shown(text);
        format!("its header is not as numpy writes it: {error}; it begins with \"{got}\"")
    })?;
    let Value::String(descr) = header.descr else {
        return Err(format!(
            "its dtype is structured: {}. Save each field as a separate array: np.save(path, a['name'])",
            shown(header.descr.to_string().as_bytes())
        ));
    };
    let dims = &header.shape[..];
    if dims.len() > RANK_MAX {
        let most = format!("more than {RANK_MAX} dimensions, the most that are supported");
        return Err(format!("its shape has {most}"));
    }
    let shape = Shape::new(dims).map_err(|_| {
        format!("its shape {dims:?} has more elements than this machine can address")
    })?;
    Ok((stored_as(descr.as_bytes())?, header.fortran_order, shape))
}

/// Python's literal as JSON: with its brackets, quotes and words, and without a comma before a
/// bracket that closes, or the suffix of Python 2's long integers.
fn as_json(text: &str) -> String {
    let mut json = String::with_capacity(text.len());
    for character in text.chars() {
        if matches!(character, ')' | ']' | '}') {
            json.truncate(json.trim_end().trim_end_matches(',').len());
        }
        match character {
            '(' => json.push('['),
            ')' => json.push(']'),
            '\'' => json.push('"'),
            'L' if json.ends_with(|last: char| last.is_ascii_digit()) => {}
            other => json.push(other),
        }
    }
    json.replace("True", "true").replace("False", "false")
}

/// How numpy spells a dtype, or `None` for bfloat16, which it does not have.
pub(super) fn descr(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::F64 => "<f8",
        DType::I32 => "<i4",
        DType::I64 => "<i8",
        DType::U8 => "|u1",
        DType::BF16 => return None,
    })
}

/// The dtype that numpy spells like this.
pub(super) fn dtype(text: &[u8]) -> Result<DType, String> {
    let spelled = |dtype: &DType| descr(*dtype).is_some_and(|own| own.as_bytes() == text);
    DType::ALL.into_iter().find(spelled).ok_or_else(|| {
        format!(
            "its dtype is '{}'; supported are <f2, <f4, <f8, |u1, <i4 and <i8. Save it as one of \
             those: np.save(path, a.astype('<f4'))",
            shown(text)
        )
    })
}

/// Everything before the elements of a row-major array, exactly as numpy writes it.
pub(super) fn written(descr: &str, shape: &[usize]) -> Vec<u8> {
    let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let dims = match &dims[..] {
        [one] => format!("{one},"),
        _ => dims.join(", "),
    };
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({dims}), }}");
    let growing = shape.first();
    let room = growing.map_or(0, |dim| GROWTH_DIGITS - dim.to_string().len());
    let prelude_bytes = MAGIC.len() + 2 + 2;
    let end = prelude_bytes + text.len() + room + 1;
    text.push_str(&" ".repeat(room + ALIGNMENT - end % ALIGNMENT));
    text.push('\n');
    // Eight dimensions of at most 19 digits stay far below the 64 KiB of a version 1 header.
    let length = (text.len() as u16).to_le_bytes();
    [MAGIC.as_slice(), &[1, 0], &length, text.as_bytes()].concat()
}

/// The start of `bytes`, printable.
fn shown(bytes: &[u8]) -> String {
    let mut shown = String::new();
    for &byte in bytes.iter().take(SHOWN_BYTES_MAX) {
        match byte {
            b' '..=b'~' => shown.push(char::from(byte)),
            _ => shown.extend(std::ascii::escape_default(byte).map(char::from)),
        }
    }
    if bytes.len() > SHOWN_BYTES_MAX {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(DType, bool, Shape), String> {
        parse(text.as_bytes(), dtype)
    }

    #[test]
    fn every_spelling_that_python_gives_the_same_dict_is_read() {
        let expected = (DType::F32, false, Shape::new(&[2, 3]).unwrap());
        for text in [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}      \n",
            "{\"shape\":(2,3,),\"descr\":\"<f4\",\"fortran_order\":False}",
            " {\n 'fortran_order' : False ,\t'shape' : ( 2L , 3L ) , 'descr' : '<f4' , } \n",
        ] {
            assert_eq!(parsed(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let of_shape =
            |shape: &str| format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
        let of_descr =
            |descr: &str| format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (2,), }}");
        for (text, named) in [
            (String::new(), "EOF"),
            ("{}".into(), "missing field `descr`"),
            (
                "{'descr': '<f4', 'shape': ()}".into(),
                "missing field `fortran_order`",
            ),
            (
                "{'descr': '<f4', 'descr': '<f4'}".into(),
                "duplicate field `descr`",
            ),
            ("{'flavour': 1}".into(), "unknown field `flavour`"),
            ("{'descr' '<f4'}".into(), "expected `:`"),
            ("{'descr': '<f4' 'shape': ()}".into(), "expected `,` or `}`"),
            (
                "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}".into(),
                "expected a boolean",
            ),
            (
                "{'descr': '<f4', 'fortran_order': Falsehood, 'shape': ()}".into(),
                "not as numpy writes it",
            ),
            (of_shape("(2, 3"), "not as numpy writes it"),
            (of_shape("(2 3)"), "expected `,` or `]`"),
            (of_shape("(-1,)"), "invalid value: integer `-1`"),
            (of_shape("(03,)"), "invalid number"),
            (of_shape("(3.0,)"), "expected usize"),
            (of_shape("((3,),)"), "expected usize"),
            (of_shape("((((((((3))))))))"), "expected usize"),
            (
                of_shape("(1, 1, 1, 1, 1, 1, 1, 1, 1)"),
                "more than 8 dimensions",
            ),
            (of_shape("(99999999999999999999999,)"), "expected usize"),
            (
                of_shape("(4294967296, 4294967296)"),
                "more elements than this machine",
            ),
            (
                of_shape("(0, 18446744073709551615, 2)"),
                "more elements than this machine",
            ),
            (of_shape("(2,)") + "x", "trailing characters"),
            (of_shape("(2,)") + "\0", "trailing characters"),
            (of_descr("'<i2'"), "'<i2'; supported are <f2"),
            (of_descr("'<u4'"), "astype('<f4')"),
            (of_descr("'<c8'"), "'<c8'"),
            (of_descr("'<U3'"), "'<U3'"),
            (of_descr("'|O'"), "'|O'; supported"),
            (of_descr("'|V2'"), "'|V2'; supported"),
            (of_descr("'|f4'"), "'|f4'; supported"),
            (of_descr("''"), "''; supported"),
            (
                of_descr("[('x', '<f4'), ('y', '<f4')]"),
                "structured: [[\"x\",\"<f4\"],[\"y\",\"<f4\"]]",
            ),
            (of_descr("('<f4', (2,))"), "structured"),
            (of_descr("'<f4"), "not as numpy writes it"),
            (of_descr("'<f4\\n'"), "'<f4\\n'; supported"),
        ] {
            let problem = parsed(&text).unwrap_err();
            assert!(
                problem.contains(named),
                "{text}\n  gave: {problem}\n  without: {named}"
            );
        }
        // The length of what a header holds does not make the message long.
        assert!(
            parsed(&of_descr(&format!("'{}'", "x".repeat(60_000))))
                .unwrap_err()
                .len()
                < 300
        );
    }

    #[test]
    fn deep_nesting_is_refused_at_its_first_bracket() {
        for bracket in ["(", "[", "{"] {
            assert!(parsed(&format!("{{'shape': {}", bracket.repeat(60_000))).is_err());
            assert!(parsed(&format!("{{'descr': {}", bracket.repeat(60_000))).is_err());
            assert!(parsed(&bracket.repeat(60_000)).is_err());
        }
    }
}
