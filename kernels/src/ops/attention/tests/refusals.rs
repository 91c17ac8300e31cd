//! Wrong calls of attention.

use super::*;

#[test]
fn wrong_calls_name_what_is_wrong() {
    let good = attention(4, [4, 2, 3], true);
    let run = Run::<f32>::new(2, good, |x| x);
    let [qkv, dout, out, lse, delta, dqkv] = &run.tensors;
    let message = |attention: Attention, out: &Tensor, lse: &Tensor, qkv: &Tensor| {
        let result = attention_into(out, lse, qkv, None, &attention);
        result.unwrap_err().to_string()
    };
    let cases = [
        (
            Attention {
                kv_heads: 3,
                ..good
            },
            "attention: kv_heads: expected a divisor of heads, which is 4, got 3",
        ),
        (
            Attention { heads: 0, ..good },
            "heads: expected at least 1, got 0",
        ),
        (
            Attention { time: 0, ..good },
            "time: expected at least 1, got 0",
        ),
        (
            Attention {
                head_size: 257,
                ..good
            },
            "head_size: expected 1 to 256, got 257",
        ),
        (
            Attention {
                scale: Some(f64::NAN),
                ..good
            },
            "scale: expected a finite number, got NaN",
        ),
        (
            Attention {
                window: Some(0),
                ..good
            },
            "window: expected at least 1, got 0",
        ),
        (
            Attention {
                window: Some(2),
                causal: false,
                ..good
            },
            "window: expected none, as it is for causal attention, got one",
        ),
        (
            Attention { time: 3, ..good },
            "expected whole sequences of 3 rows",
        ),
        (
            Attention {
                head_size: 4,
                ..good
            },
            "expected shape [8, 32], that is [batch·time, (heads + 2·kv_heads)·head_size]",
        ),
        (
            Attention {
                heads: usize::MAX,
                kv_heads: 1,
                ..good
            },
            "that is [batch·time, (heads + 2·kv_heads)·head_size]",
        ),
    ];
    for (attention, expected) in cases {
        let message = message(attention, out, lse, qkv);
        assert!(message.contains(expected), "{message}");
    }
    let narrow = cpu_of(&[0.0f32; 8], &[8, 1]);
    let text = message(good, &narrow, lse, qkv);
    assert!(
        text.contains("out") && text.contains("expected shape [8, 12]"),
        "{text}"
    );
    let text = message(good, out, &narrow, qkv);
    assert!(
        text.contains("log_sum_exp") && text.contains("[8, 4]"),
        "{text}"
    );
    let text = message(good, qkv, lse, qkv);
    assert!(text.contains("expected shape [8, 12]"), "{text}");
    let begins = cpu_of(&[0i32; 4], &[4]);
    let text = attention_into(out, lse, qkv, Some(&begins), &good).unwrap_err();
    let text = text.to_string();
    assert!(
        text.contains("begins") && text.contains("expected shape [8]"),
        "{text}"
    );
    let backward = |to: &Tensor, dout: &Tensor| {
        let result = attention_backward_into(to, delta, [dout, out], lse, qkv, None, &good);
        result.unwrap_err().to_string()
    };
    let text = backward(qkv, dout);
    assert!(text.contains("dqkv") && text.contains("overlap"), "{text}");
    let text = backward(dqkv, &narrow);
    assert!(text.contains("dout") && text.contains("[8, 12]"), "{text}");
}
