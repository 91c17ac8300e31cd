//! The header of an `.npy` file: a Python dict literal with the keys `descr`, `fortran_order` and
//! `shape`. Parses exactly that, and writes exactly numpy's bytes. Nothing recurses or allocates by
//! what a header claims; errors are sentences for `Error::BadFile`.

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
    let mut literal = Literal { text, position: 0 };
    let (mut stored, mut fortran_order, mut shape) = (None, None, None);
    literal.expect(b'{', "a dict")?;
    while !literal.accept(b'}') {
        let key = literal.string("a key")?;
        literal.expect(b':', "a colon after the key")?;
        let repeated = match key {
            b"descr" => stored.replace(stored_as(literal.descr()?)?).is_some(),
            b"fortran_order" => fortran_order.replace(literal.boolean()?).is_some(),
            b"shape" => shape.replace(literal.shape()?).is_some(),
            _ => return Err(format!("its header has the unknown key '{}'", shown(key))),
        };
        if repeated {
            return Err(format!("its header has the key '{}' twice", shown(key)));
        }
        if !literal.accept(b',') {
            literal.expect(b'}', "a comma or the end of the dict")?;
            break;
        }
    }
    literal.end()?;
    let missing = |key: &str| format!("its header lacks the key '{key}'");
    Ok((
        stored.ok_or_else(|| missing("descr"))?,
        fortran_order.ok_or_else(|| missing("fortran_order"))?,
        shape.ok_or_else(|| missing("shape"))?,
    ))
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

/// A parser of the Python literals that headers consist of.
struct Literal<'a> {
    text: &'a [u8],
    position: usize,
}

impl<'a> Literal<'a> {
    fn skip_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.text.get(self.position) {
            self.position += 1;
        }
    }

    /// The next byte after spaces, which is not consumed.
    fn peek(&mut self) -> Option<u8> {
        self.skip_space();
        self.text.get(self.position).copied()
    }

    fn accept(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.position += usize::from(found);
        found
    }

    fn refuse<T>(&mut self, expected: &str) -> Result<T, String> {
        self.skip_space();
        let rest = &self.text[self.position..];
        let got = if rest.is_empty() {
            "its end".to_string()
        } else {
            format!("\"{}\"", shown(rest))
        };
        Err(format!(
            "byte {} of its header: expected {expected}, got {got}",
            self.position
        ))
    }

    fn expect(&mut self, byte: u8, what: &str) -> Result<(), String> {
        if self.accept(byte) {
            Ok(())
        } else {
            self.refuse(what)
        }
    }

    /// Only spaces are left.
    fn end(&mut self) -> Result<(), String> {
        if self.peek().is_none() {
            Ok(())
        } else {
            self.refuse("nothing after the dict")
        }
    }

    /// A quoted string. No name in a header needs an escape.
    fn string(&mut self, what: &str) -> Result<&'a [u8], String> {
        let Some(quote @ (b'\'' | b'"')) = self.peek() else {
            return self.refuse(&format!("{what} in quotes"));
        };
        let inside = &self.text[self.position + 1..];
        match inside
            .iter()
            .position(|&byte| byte == quote || byte == b'\\' || byte == b'\n')
        {
            Some(length) if inside[length] == quote => {
                self.position += length + 2;
                Ok(&inside[..length])
            }
            _ => self.refuse(&format!("{what} in quotes, without escapes")),
        }
    }

    fn descr(&mut self) -> Result<&'a [u8], String> {
        match self.peek() {
            Some(b'[' | b'(') => {
                let dtype = shown(&self.text[self.position..]);
                Err(format!(
                    "its dtype is structured: {dtype}. Save each field as an array of its own: np.save(path, a['name'])"
                ))
            }
            _ => self.string("a dtype"),
        }
    }

    fn boolean(&mut self) -> Result<bool, String> {
        self.skip_space();
        let rest = &self.text[self.position..];
        let word_bytes = rest
            .iter()
            .take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_')
            .count();
        let value = match &rest[..word_bytes] {
            b"True" => true,
            b"False" => false,
            _ => return self.refuse("True or False"),
        };
        self.position += word_bytes;
        Ok(value)
    }

    /// A tuple of integers: `()`, `(3,)`, `(2, 3)`.
    fn shape(&mut self) -> Result<Shape, String> {
        let mut dims = [0; RANK_MAX];
        let mut rank = 0;
        self.expect(b'(', "the shape as a tuple, as in (2, 3)")?;
        let mut comma = true;
        while !self.accept(b')') {
            if !comma {
                return self.refuse("a comma or the end of the shape");
            }
            if rank == RANK_MAX {
                return Err(format!(
                    "its shape has more than {RANK_MAX} dimensions, the most that are supported"
                ));
            }
            dims[rank] = self.dimension()?;
            rank += 1;
            comma = self.accept(b',');
        }
        if rank == 1 && !comma {
            return Err(format!(
                "its shape is ({0}), a number in Python: expected ({0},)",
                dims[0]
            ));
        }
        let dims = &dims[..rank];
        Shape::new(dims).map_err(|_| {
            format!("its shape {dims:?} has more elements than this machine can address")
        })
    }

    fn dimension(&mut self) -> Result<usize, String> {
        self.skip_space();
        let rest = &self.text[self.position..];
        let digits = &rest[..rest.iter().take_while(|byte| byte.is_ascii_digit()).count()];
        if digits.is_empty() || (digits.len() > 1 && digits[0] == b'0') {
            return self.refuse("a dimension, a whole number from 0 on");
        }
        let value = digits.iter().try_fold(0_usize, |value, digit| {
            value
                .checked_mul(10)?
                .checked_add(usize::from(digit - b'0'))
        });
        let Some(value) = value else {
            return Err(format!(
                "its shape has the dimension {}, beyond what this machine can address",
                shown(digits)
            ));
        };
        self.position += digits.len();
        // Python 2 wrote long integers with a suffix.
        self.position += usize::from(self.text.get(self.position) == Some(&b'L'));
        Ok(value)
    }
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
            (String::new(), "expected a dict, got its end"),
            ("{}".into(), "lacks the key 'descr'"),
            (
                "{'descr': '<f4', 'shape': ()}".into(),
                "lacks the key 'fortran_order'",
            ),
            ("{'descr': '<f4', 'descr': '<f4'}".into(), "'descr' twice"),
            ("{'flavour': 1}".into(), "unknown key 'flavour'"),
            ("{'descr' '<f4'}".into(), "a colon"),
            ("{'descr': '<f4' 'shape': ()}".into(), "a comma or the end"),
            ("{,}".into(), "a key in quotes"),
            (
                "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}".into(),
                "True or False, got \"0",
            ),
            (
                "{'descr': '<f4', 'fortran_order': Falsehood, 'shape': ()}".into(),
                "True or False",
            ),
            (
                of_shape("(2, 3"),
                "a dimension, a whole number from 0 on, got \"}\"",
            ),
            (of_shape("(2 3)"), "a comma or the end of the shape"),
            (of_shape("(,)"), "a dimension"),
            (
                of_shape("(-1,)"),
                "a dimension, a whole number from 0 on, got \"-1,)",
            ),
            (of_shape("(03,)"), "a dimension"),
            (of_shape("(3.0,)"), "a comma or the end of the shape"),
            (of_shape("(3)"), "(3), a number in Python"),
            (of_shape("[3]"), "a tuple"),
            (of_shape("((((((((3))))))))"), "a dimension"),
            (
                of_shape("(1, 1, 1, 1, 1, 1, 1, 1, 1)"),
                "more than 8 dimensions",
            ),
            (
                of_shape("(99999999999999999999999,)"),
                "99999999999999999999999, beyond",
            ),
            (
                of_shape("(4294967296, 4294967296)"),
                "more elements than this machine",
            ),
            (
                of_shape("(0, 18446744073709551615, 2)"),
                "more elements than this machine",
            ),
            (of_shape("(2,)") + "x", "nothing after the dict"),
            (
                of_shape("(2,)") + "\0",
                "nothing after the dict, got \"\\x00\"",
            ),
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
                "structured: [('x', '<f4'), ('y', '<f4')], '",
            ),
            (of_descr("('<f4', (2,))"), "structured"),
            (of_descr("'<f4"), "'<f4, '; supported"),
            (of_descr("'<f4\\n'"), "without escapes"),
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
