//! Results lane by lane: the loops in which instructions compute them.

/// Results lane by lane, where `mask` has the lane: `map!(warp.w[d], mask, (a, b), |a, b| a + b)`,
/// whose operands are arrays.
macro_rules! map {
    ($warp:ident.$pool:ident[$d:expr], $mask:expr, ($($x:ident = $source:expr),*), $value:expr) => {{
        $(let $x = $source;)*
        let mask = $mask;
        let out = &mut $warp.$pool[*$d as usize];
        for lane in 0..LANES {
            let value = { $(let $x = $x[lane];)* $value };
            out[lane] = if mask >> lane & 1 != 0 { value } else { out[lane] };
        }
    }};
}

/// The same where the value must not be computed for other lanes, or costs much.
macro_rules! each {
    ($warp:ident.$pool:ident[$d:expr], $mask:expr, ($($x:ident = $source:expr),*), $value:expr) => {{
        $(let $x = $source;)*
        for lane in bits_of($mask) {
            let value = { $(let $x = $x[lane as usize];)* $value };
            $warp.$pool[*$d as usize][lane as usize] = value;
        }
    }};
}

macro_rules! integers {
    ($warp:ident, $mask:ident, $op:expr, $pool:ident, $unsigned:ty, $signed:ty, $wide:ty, $wide_signed:ty, $d:expr, $a:expr, $b:expr) => {{
        let (slot_a, slot_b) = (*$a as usize, *$b as usize);
        macro_rules! two {
            ($x:ident, $y:ident, $value:expr) => {
                map!(
                    $warp.$pool[$d],
                    $mask,
                    ($x = $warp.$pool[slot_a], $y = $warp.$pool[slot_b]),
                    $value
                )
            };
        }
        macro_rules! shift {
            ($x:ident, $y:ident, $value:expr) => {
                map!(
                    $warp.$pool[$d],
                    $mask,
                    ($x = $warp.$pool[slot_a], $y = $warp.w[slot_b]),
                    $value
                )
            };
        }
        const BITS: u32 = <$unsigned>::BITS;
        match $op {
            Int::Add => two!(x, y, x.wrapping_add(y)),
            Int::Sub => two!(x, y, x.wrapping_sub(y)),
            Int::Mul => two!(x, y, x.wrapping_mul(y)),
            Int::MulHighU => two!(x, y, ((x as $wide * y as $wide) >> BITS) as $unsigned),
            Int::MulHighS => {
                two!(
                    x,
                    y,
                    ((x as $signed as $wide_signed * y as $signed as $wide_signed) >> BITS)
                        as $unsigned
                )
            }
            Int::DivU | Int::DivS | Int::RemU | Int::RemS => {
                let (x, y) = ($warp.$pool[slot_a], $warp.$pool[slot_b]);
                for lane in bits_of($mask) {
                    let (x, y) = (x[lane as usize], y[lane as usize]);
                    if y == 0 {
                        return Err(Fault::new(
                            Kind::Stopped,
                            lane,
                            "an integer is divided by zero",
                        ));
                    }
                    $warp.$pool[*$d as usize][lane as usize] = match $op {
                        Int::DivU => x / y,
                        Int::RemU => x % y,
                        Int::DivS => (x as $signed).wrapping_div(y as $signed) as $unsigned,
                        _ => (x as $signed).wrapping_rem(y as $signed) as $unsigned,
                    };
                }
            }
            Int::MinU => two!(x, y, x.min(y)),
            Int::MaxU => two!(x, y, x.max(y)),
            Int::MinS => two!(x, y, (x as $signed).min(y as $signed) as $unsigned),
            Int::MaxS => two!(x, y, (x as $signed).max(y as $signed) as $unsigned),
            Int::And => two!(x, y, x & y),
            Int::Or => two!(x, y, x | y),
            Int::Xor => two!(x, y, x ^ y),
            Int::Not => two!(x, _y, !x),
            Int::Neg => two!(x, _y, x.wrapping_neg()),
            Int::Abs => two!(x, _y, (x as $signed).wrapping_abs() as $unsigned),
            // Amounts beyond the width are the width.
            Int::Shl => shift!(x, y, if y >= BITS { 0 } else { x << (y & (BITS - 1)) }),
            Int::ShrU => shift!(x, y, if y >= BITS { 0 } else { x >> (y & (BITS - 1)) }),
            Int::ShrS => shift!(x, y, (x as $signed >> y.min(BITS - 1)) as $unsigned),
        }
    }};
}

/// The comparison's predicate, for all lanes.
macro_rules! compared {
    ($compare:expr, $a:expr, $b:expr, |$x:ident| $view:expr) => {{
        let (a, b) = ($a, $b);
        macro_rules! all {
            (|$p:ident, $q:ident| $is:expr) => {{
                let mut found = 0_u32;
                for lane in 0..LANES {
                    let $p = {
                        let $x = a[lane];
                        $view
                    };
                    let $q = {
                        let $x = b[lane];
                        $view
                    };
                    found |= u32::from($is) << lane;
                }
                found
            }};
        }
        // Only NaN is unequal to itself.
        #[allow(clippy::eq_op, clippy::neg_cmp_op_on_partial_ord)]
        match $compare {
            Compare::Eq => all!(|p, q| p == q),
            Compare::Ne => all!(|p, q| p != q && p == p && q == q),
            Compare::Lt => all!(|p, q| p < q),
            Compare::Le => all!(|p, q| p <= q),
            Compare::Gt => all!(|p, q| p > q),
            Compare::Ge => all!(|p, q| p >= q),
            Compare::EqU => all!(|p, q| p == q || p != p || q != q),
            Compare::NeU => all!(|p, q| p != q),
            Compare::LtU => all!(|p, q| !(p >= q)),
            Compare::LeU => all!(|p, q| !(p > q)),
            Compare::GtU => all!(|p, q| !(p <= q)),
            Compare::GeU => all!(|p, q| !(p < q)),
            Compare::Number => all!(|p, q| p == p && q == q),
            Compare::Nan => all!(|p, q| p != p || q != q),
        }
    }};
}
