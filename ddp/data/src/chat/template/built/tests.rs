use super::*;

#[test]
fn generation_becomes_a_filter_wherever_it_is_a_tag() {
    let (text, has_marks) =
        with_marks("a{%- generation -%}{{ generation }}{% endgeneration+%}{% if x %}");
    assert_eq!(
        text,
        "a{%- filter generation -%}{{ generation }}{% endfilter+%}{% if x %}"
    );
    assert!(has_marks);
    assert_eq!(
        with_marks("{{ a }} {% if"),
        ("{{ a }} {% if".to_string(), false)
    );
}
