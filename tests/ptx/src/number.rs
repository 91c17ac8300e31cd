//! The arithmetic of single values, as the ISA defines it.

/// The NaN of results in f32; in bf16 and f16 its upper half.
pub(crate) const NAN: u32 = 0x7fff_ffff;
const NAN_HALF: u16 = 0x7fff;

/// A result of f32 arithmetic as bits: every NaN is the same one.
#[inline(always)]
pub(crate) fn bits(value: f32) -> u32 {
    if value.is_nan() { NAN } else { value.to_bits() }
}

/// `.ftz`: subnormal values become zero with their sign.
#[inline(always)]
pub(crate) fn flushed(value: u32) -> u32 {
    if value & 0x7f80_0000 == 0 {
        value & 0x8000_0000
    } else {
        value
    }
}

/// `min` and `max`: of a number and a NaN the number; −0 is less than +0.
#[inline(always)]
pub(crate) fn min(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

#[inline(always)]
pub(crate) fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a > b || (a == b && a.is_sign_positive()) {
        a
    } else {
        b
    }
}

#[inline(always)]
pub(crate) fn min64(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

#[inline(always)]
pub(crate) fn max64(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a > b || (a == b && a.is_sign_positive()) {
        a
    } else {
        b
    }
}

/// Functions that the ISA lets hardware approximate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Approximate {
    Exp2,
    Log2,
    Rsqrt,
    Rcp,
    Sqrt,
    Tanh,
    Sin,
    Cos,
}

impl Approximate {
    /// The function as the host computes it, within a unit in the last place.
    pub(crate) fn of(self, x: f32) -> f32 {
        match self {
            Approximate::Exp2 => x.exp2(),
            Approximate::Log2 => x.log2(),
            Approximate::Rsqrt => (1.0 / f64::from(x).sqrt()) as f32,
            Approximate::Rcp => 1.0 / x,
            Approximate::Sqrt => x.sqrt(),
            Approximate::Tanh => x.tanh(),
            Approximate::Sin => x.sin(),
            Approximate::Cos => x.cos(),
        }
    }

    /// The function, as good as exact.
    pub(crate) fn exactly(self, x: f64) -> f64 {
        match self {
            Approximate::Exp2 => x.exp2(),
            Approximate::Log2 => x.log2(),
            Approximate::Rsqrt => 1.0 / x.sqrt(),
            Approximate::Rcp => 1.0 / x,
            Approximate::Sqrt => x.sqrt(),
            Approximate::Tanh => x.tanh(),
            Approximate::Sin => x.sin(),
            Approximate::Cos => x.cos(),
        }
    }

    /// The largest relative error that the ISA states, in units of 2⁻²⁴; for log2, sin and cos,
    /// whose bound is absolute, as for results of 1.
    pub(crate) fn error(self) -> f64 {
        match self {
            Approximate::Exp2 | Approximate::Log2 => 4.0,
            Approximate::Rsqrt => 2.9,
            Approximate::Rcp => 2.0,
            Approximate::Sqrt => 2.0,
            Approximate::Tanh => 8192.0,
            Approximate::Sin | Approximate::Cos => 11.6,
        }
    }
}

/// `div.approx.f32` and `div.full.f32`: within 2 units in the last place. Where |b| is above 2¹²⁶
/// and finite, `approx` gives 0, or NaN if a is infinite.
#[inline(always)]
pub(crate) fn divide_approximately(a: f32, b: f32, is_full: bool) -> f32 {
    let large = f32::from_bits(0x7e80_0000);
    if !is_full && b.abs() > large && b.is_finite() {
        return if a.is_infinite() {
            f32::NAN
        } else {
            0.0f32.copysign(a * b.signum())
        };
    }
    a / b
}

/// Directions of `cvt`'s rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// bf16 from f32: the upper half, rounded.
#[inline(always)]
pub(crate) fn bf16(value: u32, rounding: Rounding) -> u16 {
    if f32::from_bits(value).is_nan() {
        return NAN_HALF;
    }
    let up = match rounding {
        Rounding::Nearest => 0x7fff + (value >> 16 & 1),
        Rounding::Zero => 0,
        Rounding::Down => (value >> 31) * 0xffff,
        Rounding::Up => (1 - (value >> 31)) * 0xffff,
    };
    // Beyond the largest finite value this is the infinity, as it should be. An infinity stays one:
    // its lower half is zero, and directed roundings add less than a whole unit.
    (value.wrapping_add(up) >> 16) as u16
}

/// f16 to f32, exact.
pub(crate) fn f16_to_f32(half: u16) -> f32 {
    let (sign, exponent, fraction) = (
        u32::from(half >> 15) << 31,
        half >> 10 & 31,
        u32::from(half & 0x3ff),
    );
    let magnitude = match exponent {
        0 => fraction as f32 * 2f32.powi(-24),
        31 if fraction != 0 => return f32::NAN,
        31 => f32::INFINITY,
        _ => f32::from_bits((u32::from(exponent) + 112) << 23 | fraction << 13),
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

/// f16 from f32, to the nearest.
pub(crate) fn f16(value: f32) -> u16 {
    if value.is_nan() {
        return NAN_HALF;
    }
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = value.abs();
    if magnitude >= 65520.0 {
        return sign | 0x7c00;
    }
    // The unit of the result: at least that of subnormal numbers.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-14);
    let units = (f64::from(magnitude) * 2f64.powi(10 - exponent)).round_ties_even() as u32;
    let below = if exponent == -14 && units < 1024 {
        0
    } else {
        (exponent + 15) as u32
    };
    let half = if below == 0 {
        units
    } else {
        (below << 10) + (units - 1024)
    };
    sign | half as u16
}

/// A type that values are converted from and to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    Unsigned(u32),
    Signed(u32),
    F16,
    Bf16,
    F32,
    F64,
}

impl Number {
    pub(crate) fn named(name: &str) -> Option<Number> {
        Some(match name {
            "u8" => Number::Unsigned(8),
            "u16" => Number::Unsigned(16),
            "u32" => Number::Unsigned(32),
            "u64" => Number::Unsigned(64),
            "s8" => Number::Signed(8),
            "s16" => Number::Signed(16),
            "s32" => Number::Signed(32),
            "s64" => Number::Signed(64),
            "f16" => Number::F16,
            "bf16" => Number::Bf16,
            "f32" => Number::F32,
            "f64" => Number::F64,
            _ => return None,
        })
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Number::F16 | Number::Bf16 | Number::F32 | Number::F64)
    }
}

/// What a conversion does besides changing the type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conversion {
    pub(crate) from: Number,
    pub(crate) to: Number,
    pub(crate) rounding: Rounding,
    /// `.rni`, `.rzi`, `.rmi`, `.rpi`: to an integer.
    pub(crate) is_integer: bool,
    pub(crate) ftz: bool,
    pub(crate) saturates: bool,
}

fn to_integer(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// f32 from an exact value that f64 holds.
fn round_to_f32(value: f64, rounding: Rounding) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    match rounding {
        Rounding::Nearest => nearest,
        Rounding::Zero if back.abs() > value.abs() => toward(nearest, back > 0.0),
        Rounding::Down if back > value => nearest.next_down(),
        Rounding::Up if back < value => nearest.next_up(),
        _ => nearest,
    }
}

fn toward(value: f32, is_positive: bool) -> f32 {
    if is_positive {
        value.next_down()
    } else {
        value.next_up()
    }
}

fn sign_extended(value: u64, bits: u32) -> i64 {
    ((value << (64 - bits)) as i64) >> (64 - bits)
}

impl Conversion {
    /// Bits of the source, zeros above, to bits of the result; integers that become wider registers
    /// are extended by their sign.
    pub(crate) fn apply(self, value: u64) -> u64 {
        match (self.from, self.to) {
            (Number::Unsigned(_) | Number::Signed(_), Number::Unsigned(_) | Number::Signed(_)) => {
                self.between_integers(value)
            }
            (Number::Unsigned(bits), _) => {
                self.integer_to_float(i128::from(value & (u64::MAX >> (64 - bits))))
            }
            (Number::Signed(bits), _) => {
                self.integer_to_float(i128::from(sign_extended(value, bits)))
            }
            (from, Number::Unsigned(_) | Number::Signed(_)) => {
                self.float_to_integer(Self::wide(from, value, self.ftz), from)
            }
            (from, _) => self.between_floats(Self::wide(from, value, self.ftz)),
        }
    }

    fn wide(from: Number, value: u64, ftz: bool) -> f64 {
        match from {
            Number::F16 => f64::from(f16_to_f32(value as u16)),
            Number::Bf16 => f64::from(f32::from_bits((value as u32) << 16)),
            Number::F32 if ftz => f64::from(f32::from_bits(flushed(value as u32))),
            Number::F32 => f64::from(f32::from_bits(value as u32)),
            _ => f64::from_bits(value),
        }
    }

    fn between_integers(self, value: u64) -> u64 {
        let exact = match self.from {
            Number::Signed(bits) => i128::from(sign_extended(value, bits)),
            Number::Unsigned(bits) => i128::from(value & (u64::MAX >> (64 - bits))),
            _ => 0,
        };
        self.placed(exact)
    }

    /// An integer in the result's register.
    fn placed(self, exact: i128) -> u64 {
        let (low, high) = self.range();
        let exact = if self.saturates {
            exact.clamp(low, high)
        } else {
            exact
        };
        match self.to {
            Number::Signed(bits) => sign_extended(exact as u64, bits) as u64,
            Number::Unsigned(bits) => exact as u64 & (u64::MAX >> (64 - bits)),
            _ => 0,
        }
    }

    fn range(self) -> (i128, i128) {
        match self.to {
            Number::Signed(bits) => (-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
            Number::Unsigned(bits) => (0, (1 << bits) - 1),
            _ => (0, 0),
        }
    }

    fn integer_to_float(self, exact: i128) -> u64 {
        match self.to {
            Number::F64 => {
                let nearest = exact as f64;
                let back = nearest as i128;
                let value = match self.rounding {
                    Rounding::Zero if back.abs() > exact.abs() => {
                        if back > 0 {
                            nearest.next_down()
                        } else {
                            nearest.next_up()
                        }
                    }
                    Rounding::Down if back > exact => nearest.next_down(),
                    Rounding::Up if back < exact => nearest.next_up(),
                    _ => nearest,
                };
                value.to_bits()
            }
            Number::F32 => {
                let nearest = exact as f32;
                let back = nearest as i128;
                let value = match self.rounding {
                    Rounding::Zero if back.abs() > exact.abs() => toward(nearest, back > 0),
                    Rounding::Down if back > exact => nearest.next_down(),
                    Rounding::Up if back < exact => nearest.next_up(),
                    _ => nearest,
                };
                u64::from(value.to_bits())
            }
            // Exact in f64 up to 2⁵³; halves have only 16 bits, and larger integers are infinite or
            // have been rounded to odd neighbours far below their precision.
            _ => self.between_floats(exact as f64),
        }
    }

    fn float_to_integer(self, value: f64, from: Number) -> u64 {
        if value.is_nan() {
            let bits = match self.to {
                Number::Signed(bits) | Number::Unsigned(bits) => bits,
                _ => 0,
            };
            let is_wide = from == Number::F64 || bits == 64;
            return if is_wide {
                self.placed(1 << (bits - 1))
            } else {
                0
            };
        }
        let (low, high) = self.range();
        // `as` goes to the ends of i128 beyond it.
        let exact = to_integer(value, self.rounding) as i128;
        self.placed(exact.clamp(low, high))
    }

    fn between_floats(self, value: f64) -> u64 {
        let mut value = if self.is_integer {
            to_integer(value, self.rounding)
        } else {
            value
        };
        if self.saturates {
            // NaN becomes +0.
            value = if value > 0.0 { value.min(1.0) } else { 0.0 };
        }
        match self.to {
            Number::F64 => value.to_bits(),
            Number::F32 => {
                let result = bits(round_to_f32(value, self.rounding));
                u64::from(if self.ftz { flushed(result) } else { result })
            }
            // From f64 to halves there is no instruction: the value has f32's bits.
            Number::Bf16 => u64::from(bf16(bits(value as f32), self.rounding)),
            _ => u64::from(f16(value as f32)),
        }
    }
}

/// `bfi`: the low `length` bits of `a` at `position` of `b`, in a word of `width` bits.
#[inline(always)]
pub(crate) fn insert(a: u64, b: u64, position: u32, length: u32, width: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if position >= width || length == 0 {
        return b;
    }
    let length = length.min(width - position);
    let field = (u64::MAX >> (64 - length)) << position;
    b & !field | a << position & field
}

/// `bfe`: `length` bits of `a` from `position` on, extended.
#[inline(always)]
pub(crate) fn extract(a: u64, position: u32, length: u32, width: u32, is_signed: bool) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    let a = if width == 32 { a & 0xffff_ffff } else { a };
    let msb = width - 1;
    let sign = if is_signed && length != 0 {
        a >> (position + length - 1).min(msb) & 1
    } else {
        0
    };
    let mut found = 0;
    for bit in 0..width {
        let set = if bit < length && position + bit <= msb {
            a >> (position + bit) & 1
        } else {
            sign
        };
        found |= set << bit;
    }
    found
}

/// `prmt` without a mode: each nibble of `selector` chooses a byte of `b:a`, or its sign.
#[inline(always)]
pub(crate) fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let all = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |word, at| {
        let choice = selector >> (at * 4) & 15;
        let byte = (all >> ((choice & 7) * 8)) as u8;
        let byte = if choice & 8 != 0 {
            ((byte as i8) >> 7) as u8
        } else {
            byte
        };
        word | u32::from(byte) << (at * 8)
    })
}

/// A word whose bits are looked up in `table` by those of three others (`lop3`).
#[inline(always)]
pub(crate) fn lookup(a: u32, b: u32, c: u32, table: u32) -> u32 {
    (0..8).fold(0, |word, row| {
        let pick = |value: u32, bit: u32| if row >> bit & 1 != 0 { value } else { !value };
        if table >> row & 1 != 0 {
            word | pick(a, 2) & pick(b, 1) & pick(c, 0)
        } else {
            word
        }
    })
}
