//! SHA-256, for the page's own rule of which script may run in it: browsers know no faster hash there, and it is of a few kilobytes.

/// The fractional parts of the square roots (`first`) or cube roots of the first primes, 32 bits each.
fn constants<const N: usize>(root: impl Fn(f64) -> f64) -> [u32; N] {
    let is_prime = |number: &u32| {
        (2..*number).take_while(|factor| factor * factor <= *number).all(|factor| !number.is_multiple_of(factor))
    };
    let mut primes = (2u32..).filter(is_prime);
    std::array::from_fn(|_| {
        let prime = primes.next().expect("there are more than enough primes");
        // The roots are below 8, so f64 holds 49 bits or more behind the point.
        (root(f64::from(prime)).fract() * 4_294_967_296.0) as u32
    })
}

/// The hash of some bytes.
pub(super) fn of(bytes: &[u8]) -> [u8; 32] {
    let mut state: [u32; 8] = constants(f64::sqrt);
    let round_constants: [u32; 64] = constants(f64::cbrt);
    let mut padded = bytes.to_vec();
    padded.push(0x80);
    let whole = (bytes.len() + 9).next_multiple_of(64);
    padded.resize(whole - 8, 0);
    padded.extend((bytes.len() as u64 * 8).to_be_bytes());
    for block in padded.chunks_exact(64) {
        mix(&mut state, block, &round_constants);
    }
    let mut hash = [0; 32];
    for (bytes, word) in hash.chunks_exact_mut(4).zip(state) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    hash
}

fn mix(state: &mut [u32; 8], block: &[u8], round_constants: &[u32; 64]) {
    let mut words = [0u32; 64];
    for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
        *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    for i in 16..64 {
        let (near, far) = (words[i - 2], words[i - 15]);
        let far = far.rotate_right(7) ^ far.rotate_right(18) ^ (far >> 3);
        let near = near.rotate_right(17) ^ near.rotate_right(19) ^ (near >> 10);
        words[i] = words[i - 16].wrapping_add(far).wrapping_add(words[i - 7]).wrapping_add(near);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (word, constant) in words.iter().zip(round_constants) {
        let turned = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let chosen = (e & f) ^ (!e & g);
        let first = h.wrapping_add(turned).wrapping_add(chosen).wrapping_add(*constant).wrapping_add(*word);
        let turned = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let majority = (a & b) ^ (a & c) ^ (b & c);
        let second = turned.wrapping_add(majority);
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
    }
    for (sum, value) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *sum = sum.wrapping_add(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hashes_are_those_of_the_standard() {
        let hex = |bytes: &[u8]| of(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hex(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let two_blocks = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
        assert_eq!(hex(two_blocks), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
        let lengths: Vec<String> = (50..70).map(|length| hex(&vec![b'a'; length])).collect();
        // 55, 56 and 64 bytes are where the padding changes.
        assert_eq!(lengths[5], "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
        assert_eq!(lengths[6], "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
        assert_eq!(lengths[14], "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
    }
}
